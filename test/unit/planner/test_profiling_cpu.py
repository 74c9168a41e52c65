"""A CPU in the planner's terms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_afd.planner.attention import core_us, dense_us
from sglang_afd.planner.constants import DEFAULTS
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode, Workload
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.predict import Prediction, predict
from sglang_afd.planner.profiling.cpu import LayerSample, Peaks, describe
from sglang_afd.planner.scenario import Scenario

SHAPE = known_shape("Qwen3-30B-A3B")
PEAKS = Peaks(bytes_per_us=200_000.0, flops_per_us=60_000.0)
BATCHES = ((1, 64), (4, 64), (16, 64), (4, 256), (16, 256))


def sample(batch: int, context: int) -> LayerSample:
    """140 us a request, 1 us a cached token; the dense part of 10 GPUs' kernels."""
    reading = SHAPE.dense_bytes / (PEAKS.bytes_per_us * DEFAULTS.weight_read_efficiency)
    return LayerSample(
        batch=batch,
        context_tokens=context,
        core_us=40 + 140 * batch + 1.0 * batch * context,
        dense_us=reading + 420,
    )


SAMPLES = [sample(batch, context) for batch, context in BATCHES]


def test_fixed_costs_are_told_from_reading_the_weights() -> None:
    gpu = describe("a CPU", 24e9, PEAKS, SHAPE, SAMPLES)

    assert gpu.operator_scale == pytest.approx(10, rel=0.01)


def test_core_attention_is_predicted_as_it_was_measured() -> None:
    gpu = describe("a CPU", 24e9, PEAKS, SHAPE, SAMPLES)

    for found in SAMPLES:
        guess = core_us(
            SHAPE,
            gpu,
            DEFAULTS,
            requests=found.batch,
            context_tokens=found.context_tokens,
            verify_tokens=1,
        )
        assert guess == pytest.approx(found.core_us, rel=0.02)


def test_the_dense_part_of_one_request_is_predicted_as_it_was_measured() -> None:
    gpu = describe("a CPU", 24e9, PEAKS, SHAPE, SAMPLES)

    guess = dense_us(SHAPE, gpu, DEFAULTS, tokens=0, fixed_us=DEFAULTS.colocated_dense_fixed_us)

    assert guess == pytest.approx(SAMPLES[0].dense_us, rel=0.02)


def test_contexts_too_short_to_be_seen_give_a_description_all_the_same() -> None:
    flat = [
        LayerSample(batch=batch, context_tokens=context, core_us=50 * batch, dense_us=400)
        for batch, context in BATCHES
    ]

    gpu = describe("a CPU", 24e9, PEAKS, SHAPE, flat)

    assert gpu.core_request_us == pytest.approx(50, rel=0.5)


def parts(prediction: Prediction) -> dict[str, float]:
    """Every time that has a fixed part of its own."""
    stages = prediction.stages
    return {
        "core": stages.core_us,
        "dense": stages.dense_us,
        "experts": stages.experts.total_us,
        "exchange": stages.exchange_us,
        "outside": prediction.outside_layers_us,
    }


COLOCATED = Deployment(mode=Mode.COLOCATED, attn_gpus=2, expert_parallel=2, batch_per_attn_gpu=8)
FUSED = Deployment(mode=Mode.AFD, attn_gpus=1, mlp_gpus=1, expert_parallel=1, batch_per_attn_gpu=8)
GROUPED = replace(FUSED, expert_kernels=ExpertKernels.GROUPED)
D = DEFAULTS
COLOCATED_EXCHANGE_US = D.colocated_exchange_fixed_us
FIXED_US = [
    (COLOCATED, (D.colocated_dense_fixed_us, D.colocated_expert_fixed_us, COLOCATED_EXCHANGE_US,
                 D.colocated_step_fixed_us)),
    (FUSED, (D.afd_dense_fixed_us, D.afd_expert_fixed_us, D.afd_exchange_fixed_us,
             D.afd_step_fixed_us)),
    (GROUPED, (D.afd_dense_fixed_us, D.colocated_expert_fixed_us, COLOCATED_EXCHANGE_US / 2,
               D.afd_step_fixed_us)),
]  # fmt: skip


@pytest.mark.parametrize(("deployment", "fixed_us"), FIXED_US)
def test_slower_operators_scale_every_fixed_cost_and_nothing_else(
    deployment: Deployment, fixed_us: tuple[float, ...]
) -> None:
    scenario = Scenario(shape=SHAPE, gpu=GPUS["H200"], workload=Workload(context_tokens=1024))
    slower = replace(scenario, gpu=replace(scenario.gpu, operator_scale=3.0))

    before, after = (parts(predict(item, deployment)) for item in (scenario, slower))

    dense, experts, exchange, outside = fixed_us
    wanted = {"core": D.core_fixed_us, "dense": dense, "experts": experts}
    wanted |= {"exchange": exchange, "outside": outside}
    for name, value in wanted.items():
        assert after[name] - before[name] == pytest.approx(2 * value), name


def test_slower_operators_delay_the_start_of_each_rank() -> None:
    scenario = Scenario(shape=SHAPE, gpu=GPUS["H200"], workload=Workload(context_tokens=1024))
    slower = replace(scenario, gpu=replace(scenario.gpu, operator_scale=3.0))

    before, after = (predict(item, COLOCATED) for item in (scenario, slower))

    of_layers = D.core_fixed_us + sum(FIXED_US[0][1][:3])
    wanted = SHAPE.num_layers * of_layers + FIXED_US[0][1][3] + 2 * D.colocated_rank_step_us
    assert after.step_us - before.step_us == pytest.approx(2 * wanted)
