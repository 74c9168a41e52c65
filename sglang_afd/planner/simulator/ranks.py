"""The MLP ranks of a group: when each of them has run what rank 0 ordered."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_afd.planner.simulator.plan import RankCosts
from sglang_afd.rounds.arrival import ArrivalQueue
from sglang_afd.rounds.follower import FollowerQueue
from sglang_afd.rounds.orders import order_of
from sglang_afd.rounds.units import Member, Unit

US = 1e-6
RowsAt = Callable[[Unit], list[list[float]]]  # by member and rank, or one for all ranks
Answered = tuple[Member, Any, float, list[float]]  # member, how rank 0 ran it, arrival, ends


class FollowingRanks:
    """Ranks other than 0 by their rule alone: in rank 0's order, each unit when its rows are there.

    Prefill they would cut by themselves; here they run rank 0's pieces.
    """

    def __init__(self, num_ranks: int, costs: RankCosts) -> None:
        self._costs = costs
        self._free_us = [0.0] * num_ranks
        self._answered: list[Answered] = []
        self.busy_us = [0.0] * num_ranks

    @property
    def leader_ends_us(self) -> float:
        """When rank 0 will have run the last unit."""
        return self._free_us[0]

    def attached(self, peer: Hashable, epoch: int, now_us: float) -> None:
        """Nothing to remember."""

    def gone(self, peer: Hashable, now_us: float) -> None:
        """Nothing to forget."""

    def leader_changed(self, now_us: float) -> None:
        """Nothing was ordered that is not run."""

    def clear(self, now_us: float) -> None:
        """All ranks drop what they run."""
        self._free_us = [now_us] * len(self._free_us)
        self._answered = []

    def ordered(
        self, unit: Unit, epochs: Mapping[Any, int], rows_at: RowsAt, now_us: float
    ) -> list[tuple[float, int]]:
        """Rank 0 begins a unit now; when which rank is to be looked at."""
        num_ranks = len(self._free_us)
        starts_us = [now_us] * num_ranks
        # Where all ways are equally long, rows that rank 0 has are everywhere.
        apart = [rows for rows in rows_at(unit) if len(rows) > 1] if num_ranks > 1 else []
        if apart:
            starts_us = [max(now_us, last_us) for last_us in map(max, *apart, apart[0])]
            starts_us[0] = now_us
        for rank, start_us in enumerate(starts_us):
            took_us = self._costs.unit_us(rank, unit)
            self._free_us[rank] = max(start_us, self._free_us[rank]) + took_us
            self.busy_us[rank] += took_us
        return []

    def leader_done(self, unit: Unit, running: Any, now_us: float) -> None:
        """Rank 0 has run it; the ends of the others are known already."""
        if not unit.is_last_piece:
            return
        ends_us = list(self._free_us)
        for member, arrived_us in zip(unit.members, running.arrived_us, strict=True):
            self._answered.append((member, running, arrived_us, ends_us))

    def arrived(self, rank: int, member: Member, now_us: float) -> list[tuple[float, int]]:
        """Of other ranks nobody is told."""
        raise AssertionError("rows for another rank than 0")

    def follow(self, rank: int, now_us: float) -> list[tuple[float, int]]:
        """Of other ranks nothing is to be looked at."""
        raise AssertionError("another rank than 0 was to be looked at")

    def take_answered(self) -> list[Answered]:
        """Exchanges that all ranks have run."""
        answered, self._answered = self._answered, []
        return answered


@dataclass(slots=True)
class _Follower:
    queue: FollowerQueue | ArrivalQueue
    running: Unit | None = None
    ends_us: float = 0.0


@dataclass(slots=True)
class _Open:
    ends_us: list[float | None]
    running: Any = None
    arrived_us: float = 0.0


class PlayedRanks:
    """Ranks other than 0 with the queues that real ones have, event by event."""

    def __init__(self, num_ranks: int, costs: RankCosts, *, has_rounds: bool) -> None:
        self._costs = costs
        queue = FollowerQueue if has_rounds else ArrivalQueue
        self._followers = [_Follower(queue()) for _ in range(num_ranks - 1)]
        self._open: dict[Member, _Open] = {}
        self._answered: list[Answered] = []
        self.busy_us = [0.0] * num_ranks
        self.leader_ends_us = 0.0

    def attached(self, peer: Hashable, epoch: int, now_us: float) -> None:
        """Every rank has passed the handshake."""
        for follower in self._followers:
            follower.queue.peer_attached(peer, epoch, now_us * US)

    def gone(self, peer: Hashable, now_us: float) -> None:
        """Every rank has lost the connection."""
        for follower in self._followers:
            follower.queue.peer_gone(peer, now_us * US)
        self._open = {member: each for member, each in self._open.items() if member.peer != peer}

    def leader_changed(self, now_us: float) -> None:
        """Another rank 0 begins its own sequence."""
        for follower in self._followers:
            if isinstance(follower.queue, FollowerQueue):
                follower.queue.leader_changed(now_us * US)

    def clear(self, now_us: float) -> None:
        """All ranks drop what they run."""
        for follower in self._followers:
            if follower.running is not None:
                follower.queue.finished(follower.running, now_us * US)
                follower.running = None
        self._open.clear()
        self._answered = []

    def ordered(
        self, unit: Unit, epochs: Mapping[Any, int], rows_at: RowsAt, now_us: float
    ) -> list[tuple[float, int]]:
        """Rank 0 begins a unit now; when which rank is to be looked at."""
        took_us = self._costs.unit_us(0, unit)
        self.busy_us[0] += took_us
        self.leader_ends_us = now_us + took_us
        if unit.is_prefill or not unit.sequence:
            return []  # every rank cuts prefill by itself; without rounds there are no orders
        order = order_of(unit, epochs)
        for follower in self._followers:
            assert isinstance(follower.queue, FollowerQueue), "an order without rounds"
            follower.queue.ordered(order)
        return [(now_us, rank) for rank in range(1, len(self._followers) + 1)]

    def leader_done(self, unit: Unit, running: Any, now_us: float) -> None:
        """Rank 0 has run it."""
        if not unit.is_last_piece:
            return
        for member, arrived_us in zip(unit.members, running.arrived_us, strict=True):
            opened = self._opened(member)
            opened.running, opened.arrived_us = running, arrived_us
            self._ends(member, 0, now_us)

    def arrived(self, rank: int, member: Member, now_us: float) -> list[tuple[float, int]]:
        """Another rank has the rows."""
        self._followers[rank - 1].queue.arrived(member, now_us * US)
        return self.follow(rank, now_us)

    def follow(self, rank: int, now_us: float) -> list[tuple[float, int]]:
        """Let another rank go on; when to look at it again."""
        follower = self._followers[rank - 1]
        unit = follower.running
        if unit is not None:
            if now_us < follower.ends_us:
                return []
            follower.running = None
            follower.queue.finished(unit, now_us * US)
            if unit.is_last_piece:
                for member in unit.members:
                    self._ends(member, rank, now_us)
        follower.running = unit = follower.queue.next_unit(now_us * US)
        if unit is None:
            return []
        took_us = self._costs.unit_us(rank, unit)
        self.busy_us[rank] += took_us
        follower.ends_us = now_us + took_us
        return [(follower.ends_us, rank)]

    def take_answered(self) -> list[Answered]:
        """Exchanges that all ranks have run."""
        answered, self._answered = self._answered, []
        return answered

    def _opened(self, member: Member) -> _Open:
        opened = self._open.get(member)
        if opened is None:
            opened = self._open[member] = _Open([None] * (len(self._followers) + 1))
        return opened

    def _ends(self, member: Member, rank: int, now_us: float) -> None:
        opened = self._opened(member)
        opened.ends_us[rank] = now_us
        ends_us = [end_us for end_us in opened.ends_us if end_us is not None]
        if len(ends_us) == len(opened.ends_us):
            del self._open[member]
            self._answered.append((member, opened.running, opened.arrived_us, ends_us))
