"""Which slot of the tables and of the shared counters each attention server has."""

from __future__ import annotations

from collections.abc import Callable, Iterable

COOL_S = 60.0  # longer than the window of times to first token

Owner = tuple[str, str]  # server id and URL


class Slots:
    """A slot gets another owner only when no relay counts for the one before any more.

    Args:
        num: How many there are.
        is_idle: Whether nothing is in flight at the server of a slot.
        on_new_owner: Called with a slot that a new owner gets.
    """

    def __init__(
        self, num: int, is_idle: Callable[[int], bool], on_new_owner: Callable[[int], None]
    ) -> None:
        self._num = num
        self._is_idle = is_idle
        self._on_new_owner = on_new_owner
        self._slots: dict[Owner, int] = {}
        self._left_s: dict[Owner, float] = {}  # those that may come back, the first to go first
        self._url_of: dict[str, str] = {}

    def take(self, owners: Iterable[Owner], now_s: float) -> list[Owner]:
        """These are all that are there now; returns those for whom no slot is left."""
        wanted = dict.fromkeys(owners)
        self._url_of = dict(list(wanted))  # from id to URL
        for owner in self._slots:
            if owner not in wanted:
                self._left_s.setdefault(owner, now_s)
        without = []
        for owner in wanted:
            self._left_s.pop(owner, None)
            if owner not in self._slots and not self._give(owner, now_s):
                without.append(owner)
        return without

    def of(self, server_id: str) -> int | None:
        """The slot of a server that is there."""
        return self._slots.get((server_id, self._url_of.get(server_id, "")))

    def owner(self, slot: int) -> str | None:
        """The server that has a slot, or had it last."""
        return next((owner[0] for owner, held in self._slots.items() if held == slot), None)

    @property
    def num_used(self) -> int:
        """One more than the largest slot that was given to anybody."""
        return len(self._slots)

    def _give(self, owner: Owner, now_s: float) -> bool:
        slot = self._free_slot(now_s)
        if slot is None:
            return False
        self._slots[owner] = slot
        self._on_new_owner(slot)
        return True

    def _free_slot(self, now_s: float) -> int | None:
        for former, left_s in self._left_s.items():
            slot = self._slots[former]
            if now_s >= left_s + COOL_S and self._is_idle(slot):
                del self._slots[former], self._left_s[former]
                return slot
        return len(self._slots) if len(self._slots) < self._num else None
