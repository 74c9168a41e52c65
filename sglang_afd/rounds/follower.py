"""The order of units on a rank that follows: the leader's for decode, its own for prefill (pure).

Were each rank to form rounds by itself, two of them could wait for each other's peers for ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable

from sglang_afd.rounds.counters import RoundCounters
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.orders import OrderedMember, UnitOrder
from sglang_afd.rounds.prefill import PrefillQueue
from sglang_afd.rounds.units import Intent, Member, Unit

DECODE_LASTS_S = 0.25  # so long after its last decode unit a rank cuts prefill into pieces


class FollowerQueue:
    """A `UnitSource` that runs decode units strictly in the leader's sequence.

    A unit waits for the rows of all its members. They were at the leader when it ordered the unit,
    so their peer has sent them to every rank, and they depend on nothing that this rank still does.
    A member whose peer is not attached here has come and gone, and is skipped.
    """

    def __init__(self, options: RoundOptions | None = None) -> None:
        self.counters = RoundCounters()
        self._orders: deque[UnitOrder] = deque()
        self._sequence = 0  # of the last order
        self._peers: dict[int, Hashable] = {}  # by epoch
        self._slots: dict[tuple[Hashable, int], Member] = {}
        self._given_up: set[Member] = set()  # replaced in their slots before they were run
        self._prefill = PrefillQueue(options or RoundOptions(), self.counters)
        self._decoded_s = -math.inf
        self._has_changed = False

    def peer_attached(self, peer: Hashable, epoch: int, now_s: float) -> None:
        """See `UnitSource`."""
        self.peer_gone(peer, now_s)
        self._peers[epoch] = peer

    def peer_gone(self, peer: Hashable, now_s: float) -> None:
        """See `UnitSource`."""
        self._peers = {epoch: other for epoch, other in self._peers.items() if other != peer}
        self._slots = {slot: held for slot, held in self._slots.items() if slot[0] != peer}
        self._given_up = {member for member in self._given_up if member.peer != peer}
        self._prefill.drop(peer)
        self._has_changed = True

    def announced(self, intent: Intent, now_s: float) -> None:
        """See `UnitSource`; the leader decides who is waited for."""

    def withdrawn(self, peer: Hashable, now_s: float, first_step: int = 0) -> None:
        """See `UnitSource`; the leader decides who is waited for."""

    def arrived(self, member: Member, now_s: float) -> None:
        """See `UnitSource`; rows of a peer that is not attached have nobody to go to."""
        if member.peer not in self._peers.values():
            return
        self._has_changed = True
        if member.is_prefill:
            self._prefill.add(member, now_s)
            return
        slot = (member.peer, member.micro_batch_id)
        held = self._slots.get(slot)
        if held == member:
            self.counters.repeated += 1
            return
        if held is not None:
            self._given_up.add(held)
        self._given_up.discard(member)
        self._slots[slot] = member

    def ordered(self, order: UnitOrder) -> None:
        """The leader runs this unit; one that was ordered before says nothing new."""
        if order.sequence <= self._sequence:
            self.counters.repeated += 1
            return
        self._sequence = order.sequence
        self._orders.append(order)
        self._has_changed = True

    def leader_changed(self, now_s: float) -> None:
        """Another leader begins its own sequence; what the last one ordered is void."""
        self._orders.clear()
        self._sequence = 0
        self._has_changed = True

    def declined(self, member: Member, now_s: float) -> None:
        """See `UnitSource`; only prefill goes in pieces."""
        self._prefill.give_up(member)

    def next_unit(self, now_s: float) -> Unit | None:
        """See `UnitSource`."""
        if not self._has_changed:
            return None
        unit = None if self._prefill.is_due(now_s) else self._next_decode_unit(now_s)
        if unit is None:
            unit = self._prefill.take(now_s, now_s < self._decoded_s + DECODE_LASTS_S)
        self._has_changed = unit is not None
        return unit

    def finished(self, unit: Unit, now_s: float) -> None:
        """See `UnitSource`."""
        self._prefill.finished(unit, now_s)
        self._has_changed = True

    def wake_at_s(self, now_s: float) -> float | None:
        """See `UnitSource`; only an event changes what may run."""
        return now_s if self._has_changed else None

    @property
    def awaited(self) -> list[tuple[Hashable, int, int]]:
        """(peer, layer_id, micro-batch) that the unit at the head waits for."""
        if not self._orders:
            return []
        order = self._orders[0]
        return [
            (self._peers[member.epoch], order.layer_id, member.micro_batch_id)
            for member in self._present(order)
            if self._find(order, member) is None
        ]

    def _next_decode_unit(self, now_s: float) -> Unit | None:
        while self._orders:
            order = self._orders[0]
            members = []
            for ordered in self._present(order):
                if (member := self._find(order, ordered)) is None:
                    return None
                members.append(member)
            self._orders.popleft()
            if members:
                return self._go(order, members, now_s)
        return None

    def _present(self, order: UnitOrder) -> list[OrderedMember]:
        return [
            member
            for member in order.members
            if member.epoch in self._peers and not self._is_given_up(order, member)
        ]

    def _is_given_up(self, order: UnitOrder, ordered: OrderedMember) -> bool:
        return any(self._is_it(member, order, ordered) for member in self._given_up)

    def _find(self, order: UnitOrder, ordered: OrderedMember) -> Member | None:
        held = self._slots.get((self._peers[ordered.epoch], ordered.micro_batch_id))
        return held if held is not None and self._is_it(held, order, ordered) else None

    def _is_it(self, member: Member, order: UnitOrder, ordered: OrderedMember) -> bool:
        return (member.peer, member.micro_batch_id, member.step, member.layer_id) == (
            self._peers[ordered.epoch],
            ordered.micro_batch_id,
            ordered.step,
            order.layer_id,
        )

    def _go(self, order: UnitOrder, members: list[Member], now_s: float) -> Unit:
        for member in members:
            del self._slots[member.peer, member.micro_batch_id]
        unit = Unit(
            layer_id=order.layer_id,
            members=tuple(members),
            sequence=order.sequence,
            micro_batch_id=order.micro_batch_id,
            num_rows=sum(member.num_rows for member in members),
        )
        self._decoded_s = now_s
        self.counters.units += 1
        self.counters.unit_peers += len(members)
        self.counters.unit_rows += unit.num_rows
        self._prefill.decode_goes(unit, now_s)
        return unit
