"""Published closed forms, reproduced."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_afd.planner.closed_forms import (
    ColocatedShares,
    LinearStages,
    fastafd_speed_up,
    fastafd_step,
    ideal_speed_up_with_free_experts,
    megascale_micro_batches,
    megascale_step_us,
)
from sglang_afd.planner.pipeline import Pipeline

# FastAFD, Qwen3-235B-A22B-FP8 at 8K on GB200: shares of the colocated step, in percent.
QWEN_8K = ColocatedShares(core=41.4, dense=15.7, moe=43.0)


def test_fastafds_published_prediction_is_reproduced() -> None:
    predicted = fastafd_speed_up(
        QWEN_8K, batch_ratio=96 / 64, num_micro_batches=2, attn_gpus=28, mlp_gpus=4
    )

    published, measured = 1.41, 2518 / 1781
    assert predicted == pytest.approx(published, rel=0.01)
    assert predicted == pytest.approx(measured, rel=0.03)


def test_fastafds_published_step_is_reproduced() -> None:
    colocated_ms = 64 / 1781 * 1000

    step_ms = colocated_ms * fastafd_step(QWEN_8K, batch_ratio=96 / 64, num_micro_batches=2)

    published, measured_7_1 = 33.6, 33.36
    assert step_ms == pytest.approx(published, rel=0.01)
    assert step_ms == pytest.approx(measured_7_1, rel=0.03)


def test_the_bound_of_free_experts_is_the_published_one() -> None:
    assert ideal_speed_up_with_free_experts(QWEN_8K) == pytest.approx(1.75, rel=0.01)


def test_nothing_gained_and_nothing_paid_is_a_speed_up_of_one() -> None:
    without_experts = ColocatedShares(core=60, dense=40, moe=1e-12)

    speed_up = fastafd_speed_up(
        without_experts, batch_ratio=1, num_micro_batches=1, attn_gpus=4, mlp_gpus=0
    )

    assert speed_up == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(("attn_us", "mlp_us"), [(100, 100), (100, 60), (55, 100)])
def test_the_pipeline_is_megascales_when_the_exchange_is_hidden(attn_us: int, mlp_us: int) -> None:
    micro_batches = megascale_micro_batches(attn_us, mlp_us, 20)
    pipeline = Pipeline(
        attn_us=attn_us,
        mlp_us=mlp_us,
        exchange_us=20,
        num_layers=61,
        num_micro_batches=micro_batches,
    )

    expected = megascale_step_us(attn_us, mlp_us, 20, 61, micro_batches)

    assert pipeline.layers_us == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("exchange_us", "wanted"), [(0, 2), (40, 3), (50, 3), (60, 4), (100, 4)])
def test_micro_batches_follow_megascales_rule(exchange_us: float, wanted: int) -> None:
    assert megascale_micro_batches(100, 100, exchange_us) == wanted


@pytest.mark.parametrize("seed", range(8))
def test_the_best_ratio_equals_a_grid_search(seed: int) -> None:
    generator = np.random.default_rng(seed)
    ratios = np.geomspace(0.01, 300, 2_001)
    for _ in range(10):
        draw = generator.uniform
        stages = LinearStages(
            attn_us_per_token=draw(1e-4, 1e-2),
            attn_fixed_us=draw(0, 50),
            exchange_us_per_request=draw(0, 0.5),
            exchange_fixed_us=draw(0, 40),
            mlp_us_per_request=draw(0.01, 1),
            mlp_fixed_us=draw(1, 100),
            batch=int(draw(8, 256)),
            held_tokens=draw(200, 8000),
        )
        throughputs = [stages.throughput(ratio) for ratio in ratios]

        best = stages.throughput(stages.best_ratio())

        assert best >= max(throughputs) * (1 - 1e-9)
