"""First come, first served: every exchange is a unit of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One exchange that waits to be served."""

    peer: bytes
    micro_batch_id: int
    step: int
    layer_id: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One expert run: the rows of all its members go through `layer_id` together."""

    layer_id: int
    members: Sequence[Member]


class ArrivalQueue:
    """Decides what to run next; the loop feeds it with events and runs what it answers."""

    def __init__(self) -> None:
        self._waiting: deque[Member] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def arrived(self, member: Member) -> None:
        """The rows of `member` are here."""
        self._waiting.append(member)

    def peer_gone(self, peer: bytes) -> None:
        """Forget what `peer` sent; nobody waits for it any more."""
        self._waiting = deque(member for member in self._waiting if member.peer != peer)

    def next_unit(self) -> Unit | None:
        """What to run now, or None when nothing is waiting."""
        if not self._waiting:
            return None
        member = self._waiting.popleft()
        return Unit(layer_id=member.layer_id, members=(member,))
