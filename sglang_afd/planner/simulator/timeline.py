"""What a simulated server did when, for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Span:
    """Steps to keep, counted from 0 on each server, and the group they are of."""

    first_step: int
    num_steps: int = 1
    group: int = 0

    def has(self, step: int) -> bool:
        """Whether a step is in it."""
        return self.first_step <= step < self.first_step + self.num_steps


@dataclass(frozen=True, slots=True)
class Interval:
    """One server busy with one thing."""

    server: str  # "attn 3" or "mlp 0", counted within the group
    name: str  # "attention", "run" or "prefill"
    start_us: float
    end_us: float
    step: int  # of the server, or of the first member
    layer: int
    micro_batch: int
    peers: int = 1  # of a run


def chrome_trace(intervals: Sequence[Interval]) -> dict[str, Any]:
    """For https://ui.perfetto.dev: a process per server."""
    servers = sorted({each.server for each in intervals}, key=_number)
    pids = {server: pid for pid, server in enumerate(servers, 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": server}}
        for server, pid in pids.items()
    ]
    for each in intervals:
        events.append(
            {
                "ph": "X",
                "name": each.name,
                "pid": pids[each.server],
                "tid": each.micro_batch,
                "ts": each.start_us,
                "dur": each.end_us - each.start_us,
                "args": {"step": each.step, "layer": each.layer, "peers": each.peers},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _number(server: str) -> tuple[str, int]:
    role, _, number = server.partition(" ")
    return role, int(number)
