"""What a simulated server did when, for a picture."""

from __future__ import annotations

from dataclasses import dataclass


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
