"""`predict` says what the model of the planner gives, for people and for programs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from planner_cases import COLLECTION, PRIORS, said, site, told

from sglang_afd.planner.causes import factors
from sglang_afd.planner.cli.sources import TRANSFER_NOISE, Source
from sglang_afd.planner.deployment import Deployment, Mode
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.predict import predict
from sglang_afd.planner.profile import Measurement, Profile, write_profile
from sglang_afd.planner.speedup import speed_up

MEASURED = ("--profile", COLLECTION, "--context", "8192")
SEVEN_TO_ONE = ("--attn-gpus", 28, "--mlp-gpus", 4, "--batch", 96, "--kernels", "fused")
SMALL = ("--model", "Qwen3-30B-A3B", "--gpu", "H200", "--source", "roofline", "--context", "4096")


def test_the_published_speed_up_over_the_best_colocated_deployment_is_met() -> None:
    answer = told("predict", *MEASURED, *SEVEN_TO_ONE)

    # Measured: 33.36 ms, 2518 tokens/s per GPU, 1.082 over expert parallelism 16 at batch 96.
    assert answer["prediction"]["step_ms"] == pytest.approx(33.36, rel=0.03)
    assert answer["prediction"]["tokens_per_s_per_gpu"] == pytest.approx(2518, rel=0.03)
    assert answer["baseline"]["deployment"]["expert_parallel"] == 16
    assert answer["speed_up"]["total"] == pytest.approx(1.082, rel=0.03)


def test_the_factors_multiply_to_the_speed_up_and_each_has_a_cause() -> None:
    shown = told("predict", *MEASURED, *SEVEN_TO_ONE)["speed_up"]

    assert math.prod(factor["value"] for factor in shown["factors"]) == pytest.approx(
        shown["total"], rel=1e-9
    )
    assert [factor["name"] for factor in shown["factors"]] == [
        "batch gain",
        "overlap gain",
        "disaggregation cost",
    ]
    assert all(len(factor["cause"]) > 10 for factor in shown["factors"])


def test_the_text_shows_the_numbers_of_the_json() -> None:
    text = said("predict", *MEASURED, *SEVEN_TO_ONE)
    answer = told("predict", *MEASURED, *SEVEN_TO_ONE)

    assert f"{answer['prediction']['step_ms']:.2f} ms" in text
    assert f"{answer['prediction']['tokens_per_s_per_gpu']:.0f} tokens/s per GPU" in text
    assert f"speed-up {answer['speed_up']['total']:.3f}" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_without_a_batch_as_many_requests_as_fit_are_taken() -> None:
    shown = told("predict", *SMALL, "--attn-gpus", 4, "--mlp-gpus", 4)["prediction"]

    attention = shown["memory"][0]
    request = attention["kv_needed_tokens"] / shown["deployment"]["batch"]
    left = attention["kv_capacity_tokens"] - attention["kv_needed_tokens"]
    assert 0 <= left < request


def test_a_named_baseline_is_taken() -> None:
    flags = ("--baseline-expert-parallel", 2, "--baseline-batch", 50)

    answer = told("predict", *SMALL, "--attn-gpus", 4, "--mlp-gpus", 4, *flags)

    assert answer["baseline"]["deployment"]["label"] == "EP2 x 2 GPUs"
    assert answer["baseline"]["deployment"]["batch"] == 50


def test_a_batch_of_the_baseline_is_taken_without_its_width() -> None:
    answer = told("predict", *SMALL, "--attn-gpus", 4, "--mlp-gpus", 4, "--baseline-batch", 50)

    assert answer["baseline"]["deployment"]["batch"] == 50


def test_jitter_slows_both_sides_and_is_shown() -> None:
    flags = (*SMALL, "--attn-gpus", 4, "--mlp-gpus", 4, "--batch", 64, "--baseline-batch", 64)

    quiet, noisy = told("predict", *flags), told("predict", *flags, "--jitter", 0.05)

    for side in ("prediction", "baseline"):
        assert noisy[side]["step_ms"] > 1.005 * quiet[side]["step_ms"], side
        assert noisy[side]["layer_us"]["jitter_wait"] > 0 == quiet[side]["layer_us"]["jitter_wait"]
    assert "5.0% of the attention of a layer" in said("predict", *flags, "--jitter", 0.05)


def test_users_are_compared_with_a_system_that_does_not_cut_batches() -> None:
    flags = ("--mode", "colocated", "--attn-gpus", 16, "--batch", 512)
    short = ("--profile", COLLECTION, "--context", 1024)

    own = told("predict", *short, *flags)
    vllm = told("predict", *short, *flags, "--colocated-pieces", 256)

    assert own["inputs"]["colocated_piece_tokens"] is None
    assert vllm["prediction"]["step_ms"] > 1.03 * own["prediction"]["step_ms"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [((), 4.0), (("--kv-dtype", "bf16"), 2.0), (("--model", "Qwen3-235B-A22B"), 4.0)],
)
def test_the_cache_is_as_wide_as_that_of_the_profile(
    tmp_path: Path, flags: tuple[str, ...], expected: float
) -> None:
    scenario = site().scenario
    path = tmp_path / "profile.json"
    write_profile(
        Profile(
            shape=replace(scenario.shape, kv_element_bytes=4.0),
            gpu=scenario.gpu,
            measurements=(),
            provenance={},
        ),
        path,
    )
    about = ("--profile", path, "--context", 4096, "--mode", "colocated", "--attn-gpus", 8)

    answer = told("predict", *about, *flags)

    assert answer["inputs"]["kv_element_bytes"] == expected


def test_without_a_profile_the_cache_is_bf16() -> None:
    answer = told("predict", *SMALL, "--mode", "colocated", "--attn-gpus", 4)

    assert answer["inputs"]["kv_element_bytes"] == 2


def test_an_fp8_cache_holds_twice_the_tokens() -> None:
    flags = ("--mode", "colocated", "--attn-gpus", 4)

    wide, narrow = (
        told("predict", *SMALL, *flags, "--kv-dtype", kind)["prediction"]["memory"][0]
        for kind in ("bf16", "fp8")
    )

    assert narrow["kv_capacity_tokens"] == pytest.approx(2 * wide["kv_capacity_tokens"], rel=1e-5)


@pytest.mark.parametrize(("left", "expected"), [(0, "more cache"), (60, "more requests")])
def test_the_cause_of_a_larger_batch_is_memory_only_where_memory_was_full(
    left: int, expected: str
) -> None:
    where = site(context=16_384)
    base = Deployment(mode=Mode.COLOCATED, attn_gpus=4, expert_parallel=4, batch_per_attn_gpu=1)
    full = where.room(base)

    result = speed_up(
        where.scenario,
        base.with_batch(full - left),
        Deployment(
            mode=Mode.AFD,
            attn_gpus=4,
            mlp_gpus=2,
            expert_parallel=2,
            micro_batches=2,
            batch_per_attn_gpu=full + 4,
        ),
    )

    assert expected in factors(result)[0][2]


def test_a_histogram_counts_for_its_own_model_only() -> None:
    shape = known_shape("Qwen3-30B-A3B")
    source = Source(kind="profile", label="", shape=shape, expert_probabilities=(8 / 128,) * 128)

    own, other = source.routing_for(shape), source.routing_for(known_shape("Qwen3-235B-A22B"))

    assert own is not None
    assert own.placed
    assert other is None


def test_a_colocated_deployment_is_predicted_without_a_comparison() -> None:
    answer = told("predict", *SMALL, "--mode", "colocated", "--attn-gpus", 4)

    assert set(answer) == {"inputs", "prediction"}
    assert answer["prediction"]["binding"] == "serial"


@pytest.mark.parametrize("mode", ["afd", "core_only"])
def test_the_prediction_is_that_of_the_model(mode: str) -> None:
    flags = ("--attn-gpus", 4, "--mlp-gpus", 2, "--batch", 64, "--micro-batches", 3)

    shown = told("predict", *SMALL, "--mode", mode, *flags, "--kernels", "fused")

    expected = predict(
        site().scenario.with_constants(PRIORS.constants),
        Deployment(
            mode=Mode(mode),
            attn_gpus=4,
            mlp_gpus=2,
            expert_parallel=2,
            micro_batches=3,
            batch_per_attn_gpu=64,
        ),
    )
    assert shown["prediction"]["step_ms"] * 1000 == pytest.approx(expected.step_us)
    assert shown["prediction"]["binding"] == expected.binding
    of_priors = PRIORS.relative_error(site().scenario, expected.deployment)
    assert shown["prediction"]["step_relative_error"] == pytest.approx(
        math.hypot(of_priors, TRANSFER_NOISE)
    )


@given(before=some.integers(16, 250), after=some.integers(16, 300), count=some.integers(1, 4))
def test_each_cause_is_true_of_its_factor(before: int, after: int, count: int) -> None:
    scenario = site().scenario
    base = Deployment(
        mode=Mode.COLOCATED, attn_gpus=4, expert_parallel=4, batch_per_attn_gpu=before
    )
    split = Deployment(
        mode=Mode.AFD,
        attn_gpus=4,
        mlp_gpus=2,
        expert_parallel=2,
        micro_batches=count,
        batch_per_attn_gpu=after,
    )

    result = speed_up(scenario, base, split)

    (_, gain, batch), (_, _, overlap), (_, cost, gpus) = factors(result)
    assert (gain == 1) == (batch == f"the same batch of {before}") or before != after
    assert ("more cache" in batch or "more requests" in batch) <= (gain >= 1)
    assert ("nothing overlaps" in overlap) == (count == 1)
    assert gpus == "2 of 6 GPUs do not attend"
    assert cost == pytest.approx(4 / 6)


def test_a_profile_gives_model_gpu_and_constants(tmp_path: Path) -> None:
    scenario = site().scenario
    deployment = Deployment(
        mode=Mode.COLOCATED, attn_gpus=4, expert_parallel=4, batch_per_attn_gpu=64
    )
    slow_us = 1.5 * predict(scenario, deployment).step_us
    path = tmp_path / "profile.json"
    write_profile(
        Profile(
            shape=scenario.shape,
            gpu=scenario.gpu,
            measurements=(
                Measurement(
                    workload=scenario.workload,
                    deployment=deployment,
                    stage="step",
                    time_us=slow_us,
                    noise=0.001,
                ),
            ),
            provenance={},
        ),
        path,
    )
    flags = ("--mode", "colocated", "--attn-gpus", 4, "--batch", 64)

    answer = told("predict", "--profile", path, "--context", 4096, *flags)

    assert answer["inputs"]["source"] == "profile"
    assert answer["inputs"]["model"] == "Qwen3-30B-A3B"
    assert answer["prediction"]["step_ms"] * 1000 == pytest.approx(slow_us, rel=0.01)
    assert answer["prediction"]["step_relative_error"] < 0.05


def test_another_model_than_the_measured_one_is_less_certain() -> None:
    flags = ("--attn-gpus", 28, "--mlp-gpus", 4, "--batch", 32)

    own = said("predict", *MEASURED, *flags)
    other = said("predict", *MEASURED, *flags, "--model", "MiniMax-M2.5")

    assert "another model or GPU" not in own
    assert "another model or GPU: 5 % more uncertainty" in other


def test_a_trace_of_lengths_gives_the_load_of_a_slot(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("200,300\n" * 3, encoding="utf-8")

    inputs = told(
        "predict", *SMALL[:-2], "--lengths", path, "--mode", "colocated", "--attn-gpus", 4
    )["inputs"]

    assert inputs["context_tokens"] == pytest.approx(349.5)
    assert inputs["context_std_tokens"] == pytest.approx(86.6, rel=1e-3)


def test_the_limit_on_the_time_of_a_token_bounds_the_batch() -> None:
    flags = ("--attn-gpus", 4, "--mlp-gpus", 4)

    slow = told("predict", *SMALL, *flags)["prediction"]
    fast = told("predict", *SMALL, *flags, "--max-tpot", 20)["prediction"]

    assert slow["tpot_ms"] > 20 >= fast["tpot_ms"]
    assert fast["deployment"]["batch"] < slow["deployment"]["batch"]
    assert re.match(r"4A4F EP4 m2", fast["deployment"]["label"])
