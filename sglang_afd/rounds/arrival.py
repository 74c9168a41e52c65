"""First come, first served: every exchange is a unit of its own. The measure for `Rounds`."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from sglang_afd.rounds.units import Intent, Member, Unit


class ArrivalQueue:
    """A `UnitSource` without rounds: it waits for nobody and joins nothing."""

    def __init__(self) -> None:
        self._waiting: deque[Member] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def peer_attached(self, peer: Hashable, epoch: int, now_s: float) -> None:
        """See `UnitSource`; nothing to remember."""

    def peer_gone(self, peer: Hashable, now_s: float) -> None:
        """See `UnitSource`."""
        self._waiting = deque(member for member in self._waiting if member.peer != peer)

    def announced(self, intent: Intent, now_s: float) -> None:
        """See `UnitSource`; nobody is waited for."""

    def withdrawn(self, peer: Hashable, now_s: float, first_step: int = 0) -> None:
        """See `UnitSource`; nobody was waited for."""

    def arrived(self, member: Member, now_s: float) -> None:
        """See `UnitSource`."""
        self._waiting.append(member)

    def declined(self, member: Member, now_s: float) -> None:
        """See `UnitSource`; it was run whole."""

    def next_unit(self, now_s: float) -> Unit | None:
        """See `UnitSource`."""
        if not self._waiting:
            return None
        member = self._waiting.popleft()
        return Unit(
            layer_id=member.layer_id,
            members=(member,),
            micro_batch_id=member.micro_batch_id,
            is_prefill=member.is_prefill,
            num_rows=member.num_rows,
        )

    def finished(self, unit: Unit, now_s: float) -> None:
        """See `UnitSource`; nothing depends on it."""

    def wake_at_s(self, now_s: float) -> float | None:
        """See `UnitSource`; what has arrived can run at once."""
        return now_s if self._waiting else None
