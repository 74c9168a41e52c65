"""Rounds: peers whose decode steps go through the layers together, so that weights are read once.

docs/rounds.md explains the rules. In short: a peer is in a round only once its rows of the first
layer are here; one round is in flight; its members are waited for at every layer; a member that
holds up the others is parked and boards a later round where it stands; prefill goes beside.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence

from sglang_afd.rounds.counters import RoundCounters
from sglang_afd.rounds.flight import Flight
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.parking import Patience
from sglang_afd.rounds.peer_state import FIRST, PeerState, Place, Position, Waiting
from sglang_afd.rounds.prefill import PrefillQueue
from sglang_afd.rounds.units import Intent, Member, Unit
from sglang_afd.rounds.window import Window


class Rounds:
    """The `UnitSource` of the rank that leads.

    A unit is handed out when the rows of all its members are here, so that a loop never blocks in
    it. What is waited for meanwhile depends on nothing but replies of units handed out before.

    Args:
        layer_ids: The MoE layers, in the order in which a step passes them.
    """

    def __init__(self, layer_ids: Sequence[int], options: RoundOptions | None = None) -> None:
        options = options or RoundOptions()
        self.counters = RoundCounters()
        self._layer_ids = tuple(layer_ids)
        self._layers = {layer_id: layer for layer, layer_id in enumerate(layer_ids)}
        self._peers: dict[Hashable, PeerState] = {}
        self._flight: Flight | None = None
        self._last: tuple[Unit, Flight] | None = None  # the last unit of a round, while it runs
        self._ended_s = -math.inf  # when the last round ended
        self._out_of_place: deque[Waiting] = deque()
        self._was_out_of_place = False
        self._is_window_open = False
        self._window = Window(options)
        self._patience = Patience(options, len(self._layer_ids))
        self._prefill = PrefillQueue(options, self.counters)
        self._sequence = 0
        self._has_changed = False  # since nothing could run
        self._look_at_s = math.inf  # when something may run though nothing changes

    # What happens

    def peer_attached(self, peer: Hashable, epoch: int, now_s: float) -> None:
        """See `UnitSource`."""
        self.peer_gone(peer, now_s)
        self._peers[peer] = PeerState(peer=peer, epoch=epoch)

    def peer_gone(self, peer: Hashable, now_s: float) -> None:
        """See `UnitSource`."""
        state = self._peers.pop(peer, None)
        if state is None:
            return
        if self._flight is not None:
            self._flight.leave(state, Place.AWAY)
        self._window.forget(peer)
        self._prefill.drop(peer)
        kept = (waiting for waiting in self._out_of_place if waiting.member.peer != peer)
        self._out_of_place = deque(kept)
        self._has_changed = True

    def announced(self, intent: Intent, now_s: float) -> None:
        """See `UnitSource`."""
        if (state := self._peers.get(intent.peer)) is not None:
            state.announce(intent)
            self._has_changed = True

    def withdrawn(self, peer: Hashable, now_s: float) -> None:
        """See `UnitSource`."""
        if (state := self._peers.get(peer)) is not None:
            state.withdraw()
            self._has_changed = True

    def arrived(self, member: Member, now_s: float) -> None:
        """See `UnitSource`; rows of a peer that is not attached have nobody to go to."""
        state = self._peers.get(member.peer)
        if state is None:
            return
        self._has_changed = True
        if member.is_prefill:
            self._take_prefill(state, member, now_s)
        elif (held := state.slots.get(member.micro_batch_id)) and held.member == member:
            self.counters.repeated += 1
        else:
            self._take_decode(state, member, now_s)

    def finished(self, unit: Unit, now_s: float) -> None:
        """See `UnitSource`."""
        self._has_changed = True
        self._prefill.finished(unit, now_s)
        for member in unit.members:
            if (state := self._peers.get(member.peer)) is not None:
                state.replied_s = now_s
                if unit.is_prefill and unit.is_last_piece:
                    self._end_prefill(state, member)
        if unit.is_prefill:
            return
        if self._flight is not None:
            self._flight.moved_s = now_s
        if self._last is not None and self._last[0] is unit:
            self._measure_round(self._last[1], now_s)
            self._last = None

    # What is asked

    def next_unit(self, now_s: float) -> Unit | None:
        """See `UnitSource`."""
        if not self._has_changed and now_s < self._look_at_s:
            return None
        self._look_at_s = math.inf
        unit = None
        if not self._prefill.is_due(now_s):
            unit = self._next_decode_unit(now_s)
        if unit is None:
            unit = self._prefill.take(now_s, self._is_anybody_decoding())
        self._has_changed = unit is not None
        self.counters.parked_peers = sum(
            state.place is Place.ASIDE for state in self._peers.values()
        )
        return unit

    def wake_at_s(self, now_s: float) -> float | None:
        """See `UnitSource`."""
        if self._has_changed:
            return now_s
        return None if self._look_at_s == math.inf else self._look_at_s

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

    @property
    def expected(self) -> list[Hashable]:
        """The peers for which a window would be held open now."""
        return [state.peer for state in self._peers.values() if state.is_expected]

    # Arrivals

    def _take_prefill(self, state: PeerState, member: Member, now_s: float) -> None:
        if state.place in (Place.ABOARD, Place.GATHERED) and member.step != state.step:
            self._put_aside(state)
        state.shows_up(member.step)
        state.is_prefilling, state.has_decoded, state.was_idle = True, False, False
        self._prefill.add(member, now_s)

    def _end_prefill(self, state: PeerState, member: Member) -> None:
        is_last_layer = self._layers.get(member.layer_id) == len(self._layer_ids) - 1
        if is_last_layer and not self._prefill.has(state.peer):
            state.is_prefilling = False

    def _take_decode(self, state: PeerState, member: Member, now_s: float) -> None:
        position = (self._layers[member.layer_id], member.micro_batch_id)
        is_new_step = member.step != state.step
        if is_new_step or state.place is Place.AWAY:
            state.micro_batch_ids = set(state.slots)
        state.micro_batch_ids.add(member.micro_batch_id)
        waiting = Waiting(member, position, now_s)
        state.slots[member.micro_batch_id] = waiting
        state.num_micro_batches = max(member.num_micro_batches, member.micro_batch_id + 1)
        state.is_prefilling = False
        state.shows_up(member.step)
        if position == FIRST and (is_new_step or state.place is Place.AWAY):
            self._gather(state, now_s)
        elif state.place is Place.AWAY:
            state.place = Place.ASIDE
        elif state.place is Place.ABOARD and is_new_step:
            self._put_aside(state)
        elif state.place is Place.GATHERED and not state.is_at(FIRST):
            state.place = Place.ASIDE
        elif state.place is Place.ABOARD:
            self._find_out_of_place(state)

    def _gather(self, state: PeerState, now_s: float) -> None:
        self._put_aside(state)
        state.place = Place.GATHERED
        state.micro_batch_ids.update(range(state.num_micro_batches))
        if state.replied_s is not None and not state.was_idle:
            self._window.measured_gap(state.peer, now_s - state.replied_s)
        state.was_idle = False

    def _put_aside(self, state: PeerState) -> None:
        if self._flight is not None:
            self._flight.leave(state, Place.ASIDE)
        state.place = Place.ASIDE if state.slots else Place.AWAY

    def _find_out_of_place(self, state: PeerState) -> None:
        """Rows of a member which the round has passed are run alone; the member catches up."""
        if self._flight is None:
            return
        for waiting in state.slots.values():
            is_known = any(waiting is other for other in self._out_of_place)
            if waiting.position < self._flight.position and not is_known:
                self._out_of_place.append(waiting)

    # Decode units

    def _next_decode_unit(self, now_s: float) -> Unit | None:
        unit = None if self._was_out_of_place else self._unit_out_of_place()
        if unit is None:
            unit = self._unit_of_round(now_s)
        else:
            self._was_out_of_place = True
            return self._goes(unit, now_s)
        if unit is None:
            unit = self._unit_out_of_place()
        self._was_out_of_place = False
        return None if unit is None else self._goes(unit, now_s)

    def _goes(self, unit: Unit, now_s: float) -> Unit:
        counters = self.counters
        counters.units += 1
        counters.unit_peers += len(unit.members)
        counters.unit_rows += unit.num_rows
        for member in unit.members:
            if (state := self._peers.get(member.peer)) is not None:
                state.replied_s = now_s
        self._prefill.decode_goes(unit, now_s)
        return unit

    def _unit_out_of_place(self) -> Unit | None:
        while self._out_of_place:
            waiting = self._out_of_place.popleft()
            state = self._peers[waiting.member.peer]
            if state.slots.get(waiting.position[1]) is waiting:
                self.counters.one_exchange_runs += 1
                member = self._take_out(state, waiting.position)
                return self._make_unit(member.layer_id, [member])
        return None

    def _make_unit(self, layer_id: int, members: list[Member]) -> Unit:
        self._sequence += 1
        return Unit(
            layer_id=layer_id,
            members=tuple(members),
            sequence=self._sequence,
            micro_batch_id=members[0].micro_batch_id,
            num_rows=sum(member.num_rows for member in members),
        )

    def _take_out(self, state: PeerState, position: Position) -> Member:
        member = state.slots.pop(position[1]).member
        is_last = position == (len(self._layer_ids) - 1, state.num_micro_batches - 1)
        if is_last and state.place in (Place.ABOARD, Place.ASIDE):
            if self._flight is not None:
                self._flight.leave(state, Place.AWAY)
            state.has_decoded = True
            state.place = Place.ASIDE
        if state.place is Place.ASIDE and state.has_decoded and not state.slots:
            state.place = Place.AWAY
        return member

    def _unit_of_round(self, now_s: float) -> Unit | None:
        while (flight := self._flight or self._start(now_s)) is not None:
            due = flight.due()
            self._drop_those_ahead(flight, due)
            here = [state for state in due if state.is_at(flight.position)]
            if len(here) < len(due) and not self._park(flight, due, here, now_s):
                return None
            riders = self._at(flight.position)
            if here or riders:
                return self._run(flight, here, riders, now_s)
            self._move_on(flight, now_s, None)
        return None

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
        micro_batch_id = flight.position[1]
        here_s = [state.slots[micro_batch_id].arrived_s for state in here]
        outside_s = [
            waiting.arrived_s for state in self._peers.values() for waiting in state.slots.values()
        ]
        deadline_s = self._patience.deadline_s(here_s, len(due), flight.moved_s, outside_s)
        if now_s < deadline_s:
            self._look_at_s = min(self._look_at_s, deadline_s)
            return False
        for state in due:
            if state not in here:
                flight.leave(state, Place.ASIDE)
                self.counters.split += 1
        flight.in_vain_s += now_s - flight.moved_s
        return True

    def _run(
        self, flight: Flight, here: list[PeerState], riders: list[PeerState], now_s: float
    ) -> Unit:
        for state in riders:
            flight.board(state)
            self._find_out_of_place(state)
        self.counters.merged += len(riders)
        position = flight.position
        members = [self._take_out(state, position) for state in (*here, *riders)]
        unit = self._make_unit(self._layer_ids[position[0]], members)
        self._move_on(flight, now_s, unit)
        return unit

    def _move_on(self, flight: Flight, now_s: float, unit: Unit | None) -> None:
        flight.moved_s = now_s
        aside = [
            state.stands_at
            for state in self._peers.values()
            if state.place is Place.ASIDE and state.stands_at is not None
        ]
        is_on = flight.advance(aside, len(self._layer_ids))
        if is_on and flight.members:
            return
        for state in list(flight.members.values()):
            state.has_decoded = True
            flight.leave(state, Place.ASIDE if state.slots else Place.AWAY)
        self._flight = None
        self._ended_s = now_s
        if unit is not None:
            self._last = (unit, flight)

    def _measure_round(self, flight: Flight, now_s: float) -> None:
        self._ended_s = now_s
        if flight.is_whole:
            round_s = now_s - flight.started_s - flight.in_vain_s
            self._window.measured_round(round_s)
            self._patience.measured_round(round_s)

    # The start of a round

    def _start(self, now_s: float) -> Flight | None:
        gathered = [state for state in self._peers.values() if state.place is Place.GATHERED]
        if not gathered:
            return self._start_aside(now_s)
        missing = [state for state in self._peers.values() if state.is_expected]
        first_s = min(state.slots[0].arrived_s for state in gathered)
        start_s = max(first_s, self._ended_s)
        if not self._is_window_over(missing, start_s, now_s):
            self._is_window_open = True
            return None
        self._give_up(missing)
        self._count_window(start_s, now_s, is_vain=bool(missing))
        return self._open_flight(FIRST, gathered, now_s)

    def _give_up(self, missing: list[PeerState]) -> None:
        for state in missing:
            state.was_missed = True

    def _count_window(self, start_s: float, now_s: float, is_vain: bool) -> None:
        if self._is_window_open:
            self.counters.windows += 1
            self.counters.vain_windows += is_vain
            self.counters.window_s += now_s - start_s
        self._is_window_open = False

    def _is_window_over(self, missing: list[PeerState], start_s: float, now_s: float) -> bool:
        until_s = max(
            (self._window.until_s(state.peer, start_s, state.replied_s) for state in missing),
            default=-math.inf,
        )
        if now_s < until_s:
            self._look_at_s = min(self._look_at_s, until_s)
            return False
        return True

    def _start_aside(self, now_s: float) -> Flight | None:
        """Take those along that wait in the middle of their steps, unless a round is about to form.

        They board that one when it comes to where they stand. Started now, they would make all
        others wait for most of a step.
        """
        aside = [
            state.stands_at
            for state in self._peers.values()
            if state.place is Place.ASIDE and state.stands_at is not None
        ]
        if not aside:
            return None
        expected = [state for state in self._peers.values() if state.is_expected]
        if not self._is_window_over(expected, self._ended_s, now_s):
            return None
        self._give_up(expected)
        position = min(aside)
        return self._open_flight(position, self._at(position), now_s)

    def _open_flight(self, position: Position, members: list[PeerState], now_s: float) -> Flight:
        self._flight = flight = Flight(position, now_s)
        for state in members:
            flight.board(state)
            self._find_out_of_place(state)
        self.counters.rounds += 1
        return flight

    def _at(self, position: Position) -> list[PeerState]:
        return [
            state
            for state in self._peers.values()
            if state.place is Place.ASIDE and state.stands_at == position
        ]

    def _is_anybody_decoding(self) -> bool:
        return any(state.is_decoding for state in self._peers.values())
