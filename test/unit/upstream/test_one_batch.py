"""The stock runner that the planner's `profile` drives, and the whole chain on a tiny model."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import pkgutil
import statistics
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checkpoints
import forked
import pytest
import torch
from torch import nn

from sglang_afd.errors import UpstreamMismatch
from sglang_afd.planner.__main__ import main
from sglang_afd.planner.predict import predict
from sglang_afd.planner.profile import Profile, read_profile
from sglang_afd.planner.profiling import steps
from sglang_afd.planner.profiling.cases import Plan, parse_cases
from sglang_afd.planner.profiling.timeline import StepTimes
from sglang_afd.upstream import one_batch

# Of the median step, in percent: the machine that runs this may be busy with something else.
BOUND_PCT = 45.0


def profile_tiny(directory: Path) -> Mapping[str, Any]:
    """In a child, since SGLang's state of a process cannot be undone."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # OpenMP's threads are not forked
    with (directory / "log").open("w") as log, contextlib.redirect_stderr(log):
        os.dup2(log.fileno(), 2)
        flags = ["--model-path", str(directory / "model"), "--out", str(directory / "profile.json")]
        cases = ["--cases", "1x32,8x32,4x128,8x128", "--blocks", "2", "--steps", "3"]
        return {"code": main(["profile", "--device", "cpu", *flags, *cases])}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("profile")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.make_qwen3_moe(directory / "model")
        answer = forked.ask_in_a_child(lambda: profile_tiny(directory))
    assert answer == {"code": 0}, (directory / "log").read_text()[-2000:]
    return directory / "profile.json"


def step_errors_pct(profile: Profile, against: Profile) -> list[float]:
    """Of the steps of `against`, predicted from `profile`."""
    constants = profile.fitted().constants
    return [
        100 * (_predicted(profile, row, constants) / row.time_us - 1)
        for row in against.measurements
        if row.stage == "step"
    ]


def _predicted(profile: Profile, row: Any, constants: Any) -> float:
    scenario = profile.scenario(row.workload).with_constants(constants)
    return predict(scenario, row.deployment).step_us


@pytest.mark.slow  # the steps were timed one after another: a machine that is busy then is not met
def test_steps_are_predicted_from_the_profile_that_measured_them(profiled: Path) -> None:
    profile = read_profile(profiled)

    errors = step_errors_pct(profile, profile)

    assert statistics.median(map(abs, errors)) < BOUND_PCT


def test_a_profile_that_is_twice_too_slow_predicts_twice_the_time(
    profiled: Path, tmp_path: Path
) -> None:
    data = json.loads(profiled.read_text())
    for row in (*data["measurements"], *data["expert_samples"]):
        row["time_us"] *= 2
    for name, value in data["gpu"].items():
        if name.endswith("_per_us"):
            data["gpu"][name] = value / 2
        elif name in ("operator_scale", "core_request_us"):
            data["gpu"][name] = value * 2
    (tmp_path / "slow.json").write_text(json.dumps(data))

    slow = step_errors_pct(read_profile(tmp_path / "slow.json"), read_profile(profiled))

    # Whatever the machine was doing: the same profile, predicted from itself, is half as far.
    honest = step_errors_pct(read_profile(profiled), read_profile(profiled))
    for wrong, right in zip(slow, honest, strict=True):
        assert (100 + wrong) / (100 + right) == pytest.approx(2, rel=0.2)


def test_a_profile_tells_what_was_measured(profiled: Path) -> None:
    profile = read_profile(profiled)

    assert {row.stage for row in profile.measurements} == {
        *("core", "dense", "experts", "outside_layers", "step")
    }
    assert [step.batch for step in profile.steps] == [1, 8, 4, 8]
    assert {sample.experts_offered for sample in profile.expert_samples} == {4, 16}
    assert sum(profile.expert_probabilities) == pytest.approx(4)
    assert profile.memory is not None
    assert (profile.shape.weight_bytes, profile.shape.kv_element_bytes) == (2, 2)  # bfloat16
    assert {"sglang", "torch", "clock", "unmatched_share"} <= set(profile.provenance)


def test_stages_make_up_a_step(profiled: Path) -> None:
    steps = read_profile(profiled).steps

    shares = [sum(step.stages_us.values()) / step.step_us for step in steps]
    # Units and layers are not mistaken by an order; more no clock of a busy machine can tell.
    assert 0.1 < statistics.median(shares) < 10
    for step in steps:
        assert min(step.stages_us[name] for name in ("core", "dense", "experts", "outside")) > 0
        assert step.stages_us["exchange"] == 0


@pytest.mark.parametrize("command", ["predict", "search", "explain"])
def test_a_profile_goes_through_the_other_commands(
    profiled: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    deployment = ["--attn-gpus", "1", "--mlp-gpus", "1"] if command == "predict" else []
    flags = ["--profile", str(profiled), "--context", "100", "--max-gpus", "4", *deployment]

    code = main([command, *flags])

    assert code == 0
    assert "colocated" in capsys.readouterr().out


class StandingClock:
    """A runner whose steps take 5 ms and whose preparation a second, on a clock of its own."""

    device = "cpu"

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_steps = 0

    def prepare(self, *, num_rows: int, context: int) -> None:
        self.now_s += 1.0

    def step(self) -> None:
        self.now_s += 0.005
        self.num_steps += 1

    def synchronize(self) -> None:
        pass


def test_steps_are_timed_in_microseconds_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = StandingClock()
    monkeypatch.setattr(steps.time, "perf_counter", lambda: runner.now_s)
    plan = Plan(cases=parse_cases("4x64,8x128"), blocks=2, steps=3, warm_steps=2)
    recorded = StepTimes(stages_us={"core": 5000.0}, by_kernel_us={})

    found = steps.measure(runner, plan, lambda number: [recorded] * number, lambda line: None)

    for times in found:
        assert times.block_medians_us == pytest.approx([5000, 5000])
        assert times.alone_us == pytest.approx([5000] * 6)
        assert times.total_us == 5000
        assert times.step_context == times.case.context + 3.5
        assert times.stage_context == times.case.context + 9.5
    assert runner.num_steps == 2 * 2 * (2 + 3 + 3)


def test_no_step_of_a_gpu_is_timed_once_a_recording_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = StandingClock()
    runner.device = "cuda"
    monkeypatch.setattr(steps, "_stream_us", lambda *args: 5000.0)  # CUDA events
    monkeypatch.setattr(steps.time, "perf_counter", lambda: runner.now_s)
    plan = Plan(cases=parse_cases("4x64,8x128"), blocks=2, steps=3, warm_steps=2)
    order: list[str] = []

    def record(number: int) -> list[StepTimes]:
        order.append("recorded")
        return [StepTimes(stages_us={"core": 5000.0}, by_kernel_us={})] * number

    steps.measure(runner, plan, record, lambda line: order.append(line.split()[0]))

    assert order == ["block"] * 4 + ["recorded", "stages:"] * 2


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UpstreamMismatch, match="wanted a mixture-of-experts model"):
        one_batch.layers_of(nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["clear", "extend", "decode", "synchronize"])
def test_sglangs_one_batch_runner_does_what_profile_asks(name: str) -> None:
    runner = pkgutil.resolve_name("sglang.benchmark.one_batch._TorchBenchRunner")

    assert callable(inspect.getattr_static(runner, name))


def test_sglang_loads_a_model_with_the_arguments_that_profile_gives() -> None:
    parameters = list(inspect.signature(one_batch.load_model).parameters)

    assert parameters == ["server_args", "port_args", "gpu_id", "tp_rank"]
