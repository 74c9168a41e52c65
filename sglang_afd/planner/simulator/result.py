"""What a simulation found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_afd.planner.simulator.accounts import TimeShares
from sglang_afd.planner.simulator.server import Counts
from sglang_afd.planner.simulator.timeline import Interval


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of a sample, in microseconds; all 0 without one."""

    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    number: int


def times_of(sample: Sequence[float]) -> Times:
    """Mean and percentiles."""
    if not sample:
        return Times(mean_us=0.0, p50_us=0.0, p90_us=0.0, p99_us=0.0, number=0)
    p50, p90, p99 = (float(value) for value in np.percentile(sample, (50, 90, 99)))
    mean = float(np.mean(sample))
    return Times(mean_us=mean, p50_us=p50, p90_us=p90, p99_us=p99, number=len(sample))


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Of one deployment, after the steps that warm up.

    A step lasts from the end of the decode step before to its own end, as a request sees it.
    """

    step: Times
    prefill: Times  # whole prefill steps
    tokens_per_s_per_gpu: float  # over all GPUs of both roles
    tpot_us: float  # mean
    attn_busy: float  # share of the time in which an attention GPU computes decode
    mlp_busy: float  # share of the time in which an MLP GPU runs
    shares: TimeShares  # of the attention servers' time
    peers_per_run: float  # decode
    parked: int  # times that a peer was left behind by its round
    exchanges: Counts
    num_servers: int
    num_ranks: int
    num_groups: int
    num_stuck_groups: int  # whose MLP servers never came back
    num_events: int
    intervals: tuple[Interval, ...]  # of the span that was asked for
    steps_us: tuple[tuple[float, ...], ...]  # of each server, by group and number
