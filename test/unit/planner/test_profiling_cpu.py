"""A CPU in the planner's terms."""

from __future__ import annotations

import pytest

from sglang_afd.planner.attention import core_us, dense_us
from sglang_afd.planner.constants import DEFAULTS
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.profiling.cpu import LayerSample, Peaks, describe

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
