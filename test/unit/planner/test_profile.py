"""Profiles as files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Deployment, Mode, Workload
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.predict import predict
from sglang_afd.planner.profile import Measurement, Profile, read_profile, write_profile

WORKLOAD = Workload(context_tokens=8192)
COLOCATED = Deployment(mode=Mode.COLOCATED, attn_gpus=4, expert_parallel=4, batch_per_attn_gpu=64)
PROFILE = Profile(
    shape=known_shape("Qwen3-235B-A22B-FP8"),
    gpu=GPUS["GB200"],
    measurements=(
        Measurement(workload=WORKLOAD, deployment=COLOCATED, stage="step", time_us=35_935.0),
    ),
    provenance={"clock": "CUDA-kernel span"},
)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "profile.json")

    assert read_profile(tmp_path / "profile.json") == PROFILE


def test_a_profile_moves_predictions_towards_its_measurements() -> None:
    scenario = PROFILE.scenario(WORKLOAD)
    before = predict(scenario, COLOCATED).step_us

    after = predict(scenario.with_constants(PROFILE.fitted().constants), COLOCATED).step_us

    assert abs(after - 35_935) < 0.5 * abs(before - 35_935)


def _changed(tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(schema_version=99), "schema 99"),
        (lambda data: data.pop("gpu"), "has no gpu"),
        (lambda data: data["provenance"].update(refused="strange_kernel"), "strange_kernel"),
        (lambda data: data.update(extra=1), "unknown field 'extra'"),
        (lambda data: data["shape"].update(num_layers="94"), r"shape\.num_layers: is '94'"),
        (lambda data: data["measurements"][0]["deployment"].update(mode="fast"), "one of"),
        (lambda data: data["measurements"][0]["deployment"].update(attn_gpus=0), "attn_gpus is 0"),
    ],
)
def test_a_broken_profile_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_profile(_changed(tmp_path, change))


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no readable profile"):
        read_profile(tmp_path / "nowhere.json")


@pytest.mark.parametrize("share", [-1.0, 1e308, float("nan"), 1.0])
def test_a_histogram_that_is_none_of_this_model_is_refused(share: float) -> None:
    shape = PROFILE.shape
    uniform = [shape.experts_per_token / shape.num_experts] * shape.num_experts
    replace(PROFILE, expert_probabilities=tuple(uniform))

    with pytest.raises(ConfigError, match="which add up to 8, the experts of a token"):
        replace(PROFILE, expert_probabilities=(share, *uniform[1:]))


@pytest.mark.parametrize("noise", [0.0, 1e-300, float("nan"), 1e9])
def test_a_measurement_cannot_be_surer_than_any_clock(noise: float) -> None:
    with pytest.raises(ConfigError, match="noise is"):
        replace(PROFILE.measurements[0], noise=noise)
