"""One measurement: delays set, the servers decoding, and the proof that nothing was skipped."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap.counts import Counts, Load
from overlap.fleet import Group, Server
from overlap.traffic import decode, throughput

SETTLE_S = 5.0  # for a last step that no client waits for
LOOK_S = 0.25
HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Times, counts, and what did not add up."""

    step_ms: float  # mean of a steady step, over the servers
    tokens_per_s: float  # of all servers while all were decoding
    cpu_busy: float  # share of all cores; where it is near 1, others disturbed the measurement
    counts: dict[str, Any]
    faults: list[str]


def measure(group: Group, attn: Sequence[Server], load: Load) -> Measurement:
    """Put `load` on each of `attn` at once; the group's other attention servers stay idle."""
    for server in group.attn:
        server.delays.set(per_call_ms=load.attn_ms, per_row_ms=load.attn_row_ms)
    for server in group.mlp:
        server.delays.set(per_call_ms=load.expert_ms, per_row_ms=load.expert_row_ms)
    before = Counts.read(group, attn)
    urls = [server.url for server in attn]
    busy_s, idle_s = _cpu_times_s()
    streams = decode(urls, batch=load.batch, num_tokens=load.num_tokens)
    busy_s, idle_s = (now - old for now, old in zip(_cpu_times_s(), (busy_s, idle_s), strict=True))
    counts = _settled(group, attn, before, load)
    return Measurement(
        step_ms=round(statistics.mean(stream.step_s() for stream in streams) * 1e3, 2),
        tokens_per_s=round(throughput(streams), 3),
        cpu_busy=round(busy_s / max(busy_s + idle_s, 1e-9), 2),
        counts=counts.summary(),
        faults=counts.faults(load),
    )


def _settled(group: Group, attn: Sequence[Server], before: Counts, load: Load) -> Counts:
    """The counts when two looks in a row saw the same and it adds up, or when that takes long."""
    deadline_s = time.monotonic() + SETTLE_S
    last = Counts.read(group, attn)
    while True:
        time.sleep(LOOK_S)
        now = Counts.read(group, attn)
        is_still = [now.attn, now.experts] == [last.attn, last.experts]
        counts = now.since(before)
        if (is_still and not counts.faults(load)) or time.monotonic() > deadline_s:
            return counts
        last = now


def _cpu_times_s() -> tuple[float, float]:
    """How long the cores of this machine have computed and idled since it started."""
    with open("/proc/stat") as file:
        user, nice, system, idle, iowait, *rest = map(int, file.readline().split()[1:])
    return (user + nice + system + sum(rest)) / HZ, (idle + iowait) / HZ
