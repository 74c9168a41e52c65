"""Waiting for the slowest of several peers (arXiv 2601.21351)."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.barrier import expected_max_normal, gaussian_barrier_us, slot_load


def test_theta_of_geometric_outputs_is_prompt_plus_mean_output() -> None:
    decode = np.random.default_rng(1).geometric(1 / 300, 400_000)

    load = slot_load(np.full(decode.shape, 200.0), decode)

    assert load.mean_tokens == pytest.approx(200 + 300 - 1, rel=0.01)


def test_theta_of_constant_outputs_is_prompt_plus_half_the_output() -> None:
    load = slot_load([200.0], [300.0])

    assert load.mean_tokens == pytest.approx(349.5, rel=1e-12)


def test_the_spread_of_a_slot_agrees_with_every_step_written_out() -> None:
    prompt, decode = [10.0, 500.0, 40.0], [7.0, 90.0, 1.0]
    steps = [p + step for p, d in zip(prompt, decode, strict=True) for step in range(int(d))]

    load = slot_load(prompt, decode)

    assert load.mean_tokens == pytest.approx(np.mean(steps), rel=1e-12)
    assert load.std_tokens == pytest.approx(np.std(steps), rel=1e-9)


def test_the_barrier_integral_agrees_with_drawn_peers() -> None:
    drawn = np.random.default_rng(2).normal(100, 10, (400_000, 8)).max(axis=1)

    barrier = gaussian_barrier_us(95, 100, 10, 8)

    assert barrier == pytest.approx(np.maximum(drawn, 95).mean(), rel=5e-4)
    assert barrier == pytest.approx(114.24, abs=0.01)


def test_a_barrier_without_spread_is_the_slower_of_the_two() -> None:
    assert gaussian_barrier_us(95, 100, 0, 8) == 100
    assert gaussian_barrier_us(120, 100, 0, 8) == 120


def test_the_slowest_of_one_is_the_mean_and_more_peers_wait_longer() -> None:
    waits = [expected_max_normal(peers) for peers in (1, 2, 8, 64)]

    assert waits[0] == pytest.approx(0, abs=1e-5)
    assert waits[1] == pytest.approx(1 / np.sqrt(np.pi), rel=1e-4)
    assert waits == sorted(waits)


def test_a_trace_without_decoded_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="decoded none"):
        slot_load([5.0], [0.0])
