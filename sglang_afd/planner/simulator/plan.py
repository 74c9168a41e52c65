"""What a server will need for one step, and who says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_afd.rounds.units import Unit


@dataclass(slots=True)
class StepPlan:
    """One step of one attention server.

    An op is one layer of one micro-batch; they are numbered in the order in which rows leave: layer
    by layer, and in each layer micro-batch by micro-batch.
    """

    is_prefill: bool
    rows: Sequence[int]  # of each micro-batch
    tokens: float  # that the step yields
    attn_us: Sequence[float]  # by op, until its rows are handed over
    # By op and MLP rank: rows, and the reply, on their way. One number instead of one for each rank
    # is for all of them.
    out_us: Sequence[Sequence[float]]
    back_us: Sequence[Sequence[float]]
    outside_us: float  # from the last result to the begin of the next step
    send_us: Sequence[float] = ()  # by op: the thread is busy while rows leave; empty: not at all
    combine_us: Sequence[float] = ()  # by op: the thread adds partial sums; empty: not at all
    next_is_prefill: bool = False
    next_from_us: float = 0.0  # the next step begins no earlier, as when its request comes then
    goes_idle: bool = False  # after it the server has no request and says so

    @property
    def num_micro_batches(self) -> int:
        """At least one."""
        return len(self.rows)


class ServerCosts(Protocol):
    """Plans the steps of one attention server, in order."""

    def next_step(self) -> StepPlan | None:
        """None when there are no more, which only a recording knows."""


class RankCosts(Protocol):
    """Of the MLP ranks of one group."""

    def unit_us(self, rank: int, unit: Unit) -> float:
        """How long this rank runs this unit."""
