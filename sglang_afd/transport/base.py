"""The exchange contract, which every transport keeps and `test/contract` checks.

A slot is (attention server, micro-batch). At most one exchange is in flight in a slot, and the
attention side keeps what it sent until the reply of every rank is there. T, H and K stand in
docs/architecture.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from sglang_afd.errors import ConfigError, PeerLost
from sglang_afd.protocol.messages import (
    Attached,
    Dispatch,
    Kind,
    RefusalCode,
    RunUnit,
    StepIntent,
    Withdrawal,
)
from sglang_afd.rounds.units import Member
from sglang_afd.topology import check_coverage


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What a dispatch carries."""

    hidden_states: Tensor  # [T, H], the agreed dtype, contiguous
    topk_ids: Tensor  # [T, K] int32, logical expert ids; -1 goes nowhere
    topk_weights: Tensor  # [T, K] float32


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One dispatch as an MLP rank received it; it owns its rows."""

    peer: bytes  # names the connection, opaque
    header: Dispatch
    rows: Rows

    @property
    def member(self) -> Member:
        """This exchange as the rounds see it."""
        header = self.header
        return Member(
            peer=self.peer,
            micro_batch_id=header.micro_batch_id,
            step=header.step,
            layer_id=header.layer_id,
            num_rows=header.num_rows,
            num_micro_batches=header.num_micro_batches,
            is_prefill=header.kind is Kind.PREFILL,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAttached:
    """An attention server passed the handshake."""

    peer: bytes
    server_id: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerGone:
    """An attached attention server left, or its connection died."""

    peer: bytes
    server_id: str
    reason: str


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """A checked dispatch of an attached attention server."""

    exchange: Exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class Announced:
    """An attached attention server announced a step, or withdrew it."""

    peer: bytes
    message: StepIntent | Withdrawal


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerJoined:
    """At rank 0: another rank is to be told the units to run."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerGone:
    """At rank 0: that rank's connection died, or another took its place."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordered:
    """At another rank: rank 0 said which unit comes next."""

    order: RunUnit


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderLost:
    """At another rank: rank 0 is gone, and what it ordered last may never be followed by more."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderFound:
    """At another rank: rank 0 will say from now on which unit comes next."""


Event = (
    PeerAttached
    | PeerGone
    | Arrived
    | Announced
    | FollowerJoined
    | FollowerGone
    | Ordered
    | LeaderLost
    | LeaderFound
)


def check_group(
    attached: Sequence[Attached], addresses: Sequence[str], num_experts: int
) -> tuple[Attached, ...]:
    """Check that the ranks at `addresses` are one whole group, rank 0 first.

    Raises:
        ConfigError: A rank stands in another's place, or an expert is nobody's or of two ranks.
    """
    for rank, answer in enumerate(attached):
        if answer.rank != rank or answer.ep_size != len(addresses):
            raise ConfigError(
                f"the server at {addresses[rank]} is rank {answer.rank} of "
                f"{answer.ep_size}, expected rank {rank} of {len(addresses)}"
            )
    check_coverage(((answer.first_expert, answer.stop_expert) for answer in attached), num_experts)
    return tuple(attached)


class Link(ABC):
    """The attention side: attached to every MLP rank of one group, under one epoch.

    Used by one thread, the scheduler's; only `mark_lost` may be called from another.
    """

    ranks: tuple[Attached, ...]  # ascending rank; together they own every expert
    epoch: int  # of this attachment; every exchange carries it

    @abstractmethod
    def dispatch(self, header: Dispatch, rows: Rows) -> None:
        """Start one exchange; returns without waiting.

        The slot is `header.micro_batch_id`; it holds `rows` until `combine` returned, and the
        caller must not write into them meanwhile.

        Raises:
            CapacityError: More rows than the handshake agreed on.
            PeerLost: A rank is gone.
        """

    @abstractmethod
    def combine(self, micro_batch_id: int, *, limit_s: float = math.inf) -> Tensor:
        """Wait for the partial sums of every rank and add them in rank order.

        Args:
            micro_batch_id: Names the slot.
            limit_s: `time.monotonic()` at which the wait ends, if the stall deadline is later.

        Returns: [T, H] in the agreed dtype, owned by the caller.
        Raises:
            PeerLost: A rank is gone, failed on these rows, or missed the deadline.
        """

    @abstractmethod
    def announce(self, message: StepIntent | Withdrawal) -> None:
        """Tell rank 0 what is to come; returns at once, and is silently lost where it cannot go."""

    @abstractmethod
    def mark_lost(self, reason: str) -> None:
        """Declare the group lost and wake a waiting `combine`; the first reason stands."""

    @property
    @abstractmethod
    def lost(self) -> str | None:
        """Why the group is lost, or None while it serves."""

    def raise_if_lost(self) -> None:
        """Raise PeerLost with the reason once the group is lost."""
        if self.lost is not None:
            raise PeerLost(self.lost)

    @abstractmethod
    def close(self) -> None:
        """Say goodbye where possible and free everything; idempotent."""


class Hub(ABC):
    """The MLP side: one rank's end of the exchanges with every attention server."""

    address: str  # what attention servers connect to

    @property
    @abstractmethod
    def num_refused(self) -> int:
        """Messages declined since the start."""

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Event]:
        """What happened since the last call, waiting up to `timeout_s` for something to happen."""

    @abstractmethod
    def reply(self, exchange: Exchange, partial: Tensor) -> None:
        """Send this rank's partial sum, `[T, H]` in the agreed dtype; skips a peer that left."""

    @abstractmethod
    def decline(self, exchange: Exchange, code: RefusalCode, message: str) -> None:
        """Tell the sender that this exchange has no result."""

    @abstractmethod
    def order(self, unit: RunUnit) -> None:
        """At rank 0: tell every rank that follows what to run next."""

    @abstractmethod
    def expel(self, reason: str) -> list[Event]:
        """Send every attention server away, to attach again; returns that they are gone."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; idempotent."""
