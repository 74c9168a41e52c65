"""Decode units: the round in flight from layer to layer, and what is out of its place (pure)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence

from sglang_afd.rounds.counters import RoundCounters
from sglang_afd.rounds.flight import Flight
from sglang_afd.rounds.formation import Formation, positions_aside
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.parking import Patience
from sglang_afd.rounds.peer_state import FIRST, PeerState, Place, Position, Waiting
from sglang_afd.rounds.units import Member, Unit


class DecodeQueue:
    """Takes decode rows and answers with units; `peers` is shared with who knows their intents."""

    def __init__(
        self,
        layer_ids: Sequence[int],
        peers: Mapping[Hashable, PeerState],
        options: RoundOptions,
        counters: RoundCounters,
    ) -> None:
        self._layer_ids = tuple(layer_ids)
        self._layers = {layer_id: layer for layer, layer_id in enumerate(layer_ids)}
        self._peers = peers
        self._counters = counters
        self._formation = Formation(peers, options, counters)
        self._patience = Patience(options, len(self._layer_ids))
        self._flight: Flight | None = None
        self._last: tuple[Unit, Flight] | None = None  # the last unit of a round, while it runs
        self._out_of_place: deque[Waiting] = deque()
        self._was_out_of_place = False
        self._sequence = 0
        self.look_at_s = math.inf  # when something may run though nothing happens

    def arrived(self, state: PeerState, member: Member, now_s: float) -> None:
        """Rows are here; a later exchange of the same slot takes the place of an earlier one."""
        held = state.slots.get(member.micro_batch_id)
        if held is not None and held.member == member:
            self._counters.repeated += 1
            return
        position = (self._layers[member.layer_id], member.micro_batch_id)
        is_new_step = member.step != state.step
        if position[0] > 0 and state.replied_s is not None:
            self._patience.measured_turn(state.peer, now_s - state.replied_s)
        if is_new_step or state.place is Place.AWAY:
            state.micro_batch_ids = set(state.slots)
        state.micro_batch_ids.add(member.micro_batch_id)
        state.slots[member.micro_batch_id] = Waiting(member, position, now_s)
        state.num_micro_batches = max(member.num_micro_batches, member.micro_batch_id + 1)
        state.is_prefilling = False
        state.shows_up(member.step)
        if position == FIRST and (is_new_step or state.place is Place.AWAY):
            self._gather(state, now_s)
        elif is_new_step or not self._is_in_place(state):
            self.put_aside(state)
        elif state.place is Place.ABOARD:
            self._find_out_of_place(state)

    def put_aside(self, state: PeerState) -> None:
        """Its step is not, or no longer, in the order of a round."""
        if self._flight is not None:
            self._flight.leave(state, Place.ASIDE)
        state.place = Place.ASIDE if state.slots else Place.AWAY

    def gone(self, state: PeerState) -> None:
        """A peer left."""
        if self._flight is not None:
            self._flight.leave(state, Place.AWAY)
        self._formation.window.forget(state.peer)
        self._patience.forget(state.peer)
        kept = (waiting for waiting in self._out_of_place if waiting.member.peer != state.peer)
        self._out_of_place = deque(kept)

    def finished(self, unit: Unit, now_s: float) -> None:
        """The replies of a decode unit have left."""
        if self._flight is not None:
            self._flight.moved_s = now_s
        if self._last is not None and self._last[0] is unit:
            flight, self._last = self._last[1], None
            self._formation.ended_s = now_s
            if flight.is_whole:
                round_s = now_s - flight.started_s - flight.in_vain_s
                self._formation.window.measured_round(round_s)
                self._patience.measured_round(round_s)

    def next_unit(self, now_s: float) -> Unit | None:
        """What is out of place, and the round, in turns; None while both wait."""
        self.look_at_s = math.inf
        unit = None if self._was_out_of_place else self._unit_out_of_place()
        self._was_out_of_place = unit is not None
        return unit or self._unit_of_round(now_s) or self._unit_out_of_place()

    @property
    def awaited(self) -> list[tuple[Hashable, int, int]]:
        """(peer, layer_id, micro-batch) that the round in flight waits for."""
        if self._flight is None:
            return []
        layer, micro_batch_id = self._flight.position
        return [
            (state.peer, self._layer_ids[layer], micro_batch_id)
            for state in self._flight.due()
            if not state.is_at(self._flight.position)
        ]

    # Arrivals

    def _gather(self, state: PeerState, now_s: float) -> None:
        self.put_aside(state)
        state.place = Place.GATHERED
        state.micro_batch_ids.update(range(state.num_micro_batches))
        if state.replied_s is not None and not state.was_idle:
            self._formation.window.measured_gap(state.peer, now_s - state.replied_s)
        state.was_idle = False

    def _is_in_place(self, state: PeerState) -> bool:
        if state.place is Place.GATHERED:
            return state.is_at(FIRST)
        return state.place is Place.ABOARD

    def _find_out_of_place(self, state: PeerState) -> None:
        """Rows of a member which the round has passed are run alone; the member catches up."""
        if self._flight is None:
            return
        for waiting in state.slots.values():
            is_known = any(waiting is other for other in self._out_of_place)
            if waiting.position < self._flight.position and not is_known:
                self._out_of_place.append(waiting)

    # Units

    def _unit_out_of_place(self) -> Unit | None:
        while self._out_of_place:
            waiting = self._out_of_place.popleft()
            state = self._peers[waiting.member.peer]
            if state.slots.get(waiting.position[1]) is waiting:
                self._counters.one_exchange_runs += 1
                return self._make_unit([self._take_out(state, waiting.position)])
        return None

    def _unit_of_round(self, now_s: float) -> Unit | None:
        while (flight := self._flight or self._start(now_s)) is not None:
            due = flight.due()
            self._drop_those_ahead(flight, due)
            here = [state for state in due if state.is_at(flight.position)]
            if len(here) < len(due) and not self._park(flight, due, here, now_s):
                return None
            riders = self._riders(flight.position)
            if here or riders:
                return self._run(flight, here, riders, now_s)
            self._move_on(flight, now_s, None)
        return None

    def _start(self, now_s: float) -> Flight | None:
        position = self._formation.next_start(now_s)
        if position is None:
            self.look_at_s = self._formation.look_at_s
            return None
        self._flight = flight = Flight(position, now_s)
        for state in self._who_starts(position):
            flight.board(state)
            self._find_out_of_place(state)
        self._counters.rounds += 1
        return flight

    def _who_starts(self, position: Position) -> list[PeerState]:
        gathered = [state for state in self._peers.values() if state.place is Place.GATHERED]
        return gathered if position == FIRST and gathered else self._riders(position)

    def _riders(self, position: Position) -> list[PeerState]:
        return [
            state
            for state in self._peers.values()
            if state.place is Place.ASIDE and state.stands_at == position
        ]

    def _drop_those_ahead(self, flight: Flight, due: list[PeerState]) -> None:
        """Members that skipped this position will not come to it."""
        for state in list(due):
            waiting = state.slots.get(flight.position[1])
            if waiting is not None and waiting.position > flight.position:
                flight.leave(state, Place.ASIDE)
                due.remove(state)

    def _park(
        self, flight: Flight, due: list[PeerState], here: list[PeerState], now_s: float
    ) -> bool:
        """Whether the round goes on without those that are missing."""
        here_s = [state.slots[flight.position[1]].arrived_s for state in here]
        waiting_s = [
            waiting.arrived_s for state in self._peers.values() for waiting in state.slots.values()
        ]
        decoding = [state.peer for state in self._peers.values() if state.place is not Place.AWAY]
        deadline_s = self._patience.deadline_s(
            here_s, len(due), flight.moved_s, waiting_s, decoding
        )
        if now_s < deadline_s:
            self.look_at_s = deadline_s
            return False
        for state in due:
            if state not in here:
                flight.leave(state, Place.ASIDE)
                self._counters.split += 1
        flight.in_vain_s += now_s - flight.moved_s
        return True

    def _run(
        self, flight: Flight, here: list[PeerState], riders: list[PeerState], now_s: float
    ) -> Unit:
        for state in riders:
            flight.board(state)
            self._find_out_of_place(state)
        self._counters.merged += len(riders)
        position = flight.position
        unit = self._make_unit([self._take_out(state, position) for state in (*here, *riders)])
        self._move_on(flight, now_s, unit)
        return unit

    def _move_on(self, flight: Flight, now_s: float, unit: Unit | None) -> None:
        flight.moved_s = now_s
        is_on = flight.advance(positions_aside(self._peers), len(self._layer_ids))
        if is_on and flight.members:
            return
        for state in list(flight.members.values()):
            state.has_decoded = True
            flight.leave(state, Place.ASIDE if state.slots else Place.AWAY)
        self._flight = None
        self._formation.ended_s = now_s
        if unit is not None:
            self._last = (unit, flight)

    def _take_out(self, state: PeerState, position: Position) -> Member:
        member = state.slots.pop(position[1]).member
        is_last = position == (len(self._layer_ids) - 1, state.num_micro_batches - 1)
        if is_last and state.place in (Place.ABOARD, Place.ASIDE):
            if self._flight is not None:
                self._flight.leave(state, Place.ASIDE)
            state.has_decoded = True
            state.place = Place.ASIDE
        if state.place is Place.ASIDE and state.has_decoded and not state.slots:
            state.place = Place.AWAY
        return member

    def _make_unit(self, members: Sequence[Member]) -> Unit:
        self._sequence += 1
        self._counters.units += 1
        self._counters.unit_peers += len(members)
        num_rows = sum(member.num_rows for member in members)
        self._counters.unit_rows += num_rows
        return Unit(
            layer_id=members[0].layer_id,
            members=tuple(members),
            sequence=self._sequence,
            micro_batch_id=members[0].micro_batch_id,
            num_rows=num_rows,
        )
