"""The words of this room: what arrives, what is announced, and what is run (pure).

Members and units are made and compared several times for each expert run on a GPU, whose host must
stay ahead of it: msgspec's structs take a tenth of the time that frozen dataclasses take.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Member(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One exchange that has arrived: one micro-batch of one peer at one layer."""

    peer: Hashable  # an attention server; opaque
    micro_batch_id: int  # 0 .. num_micro_batches - 1
    step: int
    layer_id: int
    num_rows: int
    num_micro_batches: int = 1  # of this peer's step
    is_prefill: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """What a peer's scheduler says of its next step; a hint that may be late, lost or wrong."""

    peer: Hashable
    step: int
    num_rows: int
    num_micro_batches: int = 1
    is_prefill: bool = False


class Unit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One expert run: the rows of all its members go through `layer_id` together.

    A prefill unit has one member and may be a piece of its rows, `first_row` and on.
    """

    layer_id: int
    members: Sequence[Member]
    sequence: int = 0  # of decode units, the same on every rank; prefill units have 0
    micro_batch_id: int = 0
    is_prefill: bool = False
    first_row: int = 0
    num_rows: int = 0  # of this run
    is_last_piece: bool = True  # the members get their replies after it


class UnitSource(Protocol):
    """Decides what an MLP rank runs next; the loop feeds it with events and runs what it answers.

    Times are seconds of one monotonic clock, handed in with every call.
    """

    def peer_attached(self, peer: Hashable, epoch: int, now_s: float) -> None:
        """A peer passed the handshake."""

    def peer_gone(self, peer: Hashable, now_s: float) -> None:
        """Forget what `peer` sent; nobody waits for it any more."""

    def announced(self, intent: Intent, now_s: float) -> None:
        """A peer's scheduler announced a step."""

    def withdrawn(self, peer: Hashable, now_s: float, first_step: int = 0) -> None:
        """A peer has no step to come from `first_step` on: it will be idle."""

    def arrived(self, member: Member, now_s: float) -> None:
        """The rows of `member` are here."""

    def declined(self, member: Member, now_s: float) -> None:
        """`member` was answered without a result; nothing more of it is to run."""

    def next_unit(self, now_s: float) -> Unit | None:
        """What to run now, or None when nothing may run yet."""

    def finished(self, unit: Unit, now_s: float) -> None:
        """The replies of `unit` are on their way."""

    def wake_at_s(self, now_s: float) -> float | None:
        """When to ask again though nothing happens; None when only an event can change anything."""
