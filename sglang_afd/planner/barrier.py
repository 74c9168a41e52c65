"""Waiting for the slowest of several peers whose requests hold unequal contexts.

Source: arXiv 2601.21351 (v4): the slot statistic theta, its variance, and the Gaussian barrier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks


@dataclass(frozen=True)
class SlotLoad:
    """Tokens that a slot of a running batch holds, over all its steps."""

    mean_tokens: float  # theta
    std_tokens: float


def slot_load(prompt_tokens: Sequence[float], decode_tokens: Sequence[float]) -> SlotLoad:
    """From a trace of finished requests; no assumption about their distribution.

    A request of prompt P that decodes D tokens holds P, P+1, ... P+D-1 tokens in its D steps, and a
    slot meets it in proportion to D. Hence theta = E[D P + D (D - 1) / 2] / E[D].
    """
    prompt = np.asarray(prompt_tokens, dtype=np.float64)
    decode = np.asarray(decode_tokens, dtype=np.float64)
    if prompt.shape != decode.shape or prompt.ndim != 1 or prompt.size == 0:
        raise ConfigError(
            f"trace: {prompt.size} prompt lengths and {decode.size} decode lengths; "
            "wanted one of each per request, at least one request"
        )
    if not (np.all(prompt >= 0) and np.all(decode >= 1) and np.all(prompt + decode < 1e9)):
        raise ConfigError(
            "trace: a prompt below 0 tokens, a request that decoded none, or what is no length"
        )
    steps = decode.sum()
    mean = float((decode * prompt + decode * (decode - 1) / 2).sum() / steps)
    squares = (
        decode * prompt**2
        + prompt * decode * (decode - 1)
        + (decode - 1) * decode * (2 * decode - 1) / 6
    )
    variance = float(squares.sum() / steps) - mean**2
    return SlotLoad(mean, math.sqrt(max(variance, 0.0)))


def gaussian_barrier_us(floor_us: float, mean_us: float, std_us: float, num_peers: int) -> float:
    """E[max(floor, slowest peer)], when the peers' times are independent normal variables."""
    checks.whole("barrier", "num_peers", num_peers)
    if std_us <= 0:
        return max(floor_us, mean_us)
    start = (floor_us - mean_us) / std_us
    return floor_us + std_us * _integral_above(start, num_peers)


@lru_cache(maxsize=1024)
def expected_max_normal(num_peers: int) -> float:
    """E[max] of this many standard normal variables: 0 for one, 1.42 for eight."""
    low = -12.0
    return low + _integral_above(low, num_peers)


def _integral_above(start: float, num_peers: int) -> float:
    """The integral of 1 - Phi(x)^n from start on."""
    start = max(start, -40.0)
    stop = max(start, 0.0) + 12.0
    x = np.linspace(start, stop, 4001)
    cdf = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    return float(np.trapezoid(1 - cdf**num_peers, x))
