"""The MLP role's main loop on a GPU: it enqueues units ahead of their rows and never waits for one.

A decode unit's replies make its members' next exchanges sure to come, so those count as arrived
when the unit is enqueued, and the kernels wait for the rows. Real arrivals, of first layers and of
prefill, are heard of by doorbell. At most RUN_AHEAD units are enqueued and not done.

A round waits for each of its members unless that is dead: what the stream waits for cannot be
parked. Only a micro-batch of the first layer that is late is parked as on a CPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from sglang_afd.errors import AfdError
from sglang_afd.mlp.board import Board, Counter, State
from sglang_afd.mlp.device_plan import launch_of, parts_of
from sglang_afd.mlp.device_units import DeviceUnits
from sglang_afd.mlp.in_flight import InFlight
from sglang_afd.mlp.rank_order import RankOrder
from sglang_afd.mlp.reception import Reception
from sglang_afd.protocol.messages import StepIntent, Withdrawal
from sglang_afd.rounds.prediction import Predictor
from sglang_afd.rounds.units import Member, Unit
from sglang_afd.trace.mlp import MlpTimeline
from sglang_afd.transport.base import Announced, Event, Exchange, PeerAttached

RUN_AHEAD = 4  # units; fewer would leave the GPU idle, more would hold up what comes by doorbell
SPIN_S = 0.010  # after the last thing that happened; longer than a host gap between two steps
NAP_S = 0.001  # between two looks at the doorbells, of a peer that may come any time
IDLE_TURN_S = 0.05  # the same when every peer said that it is idle
REHEARSE_S = 0.0003  # between two rehearsals of a launch
LOOK_S = 0.1  # between two looks at what costs more than reading a word
DRAIN_S = 2.0  # for units in flight to end by themselves when this server stops


class DeviceHub(Protocol):
    """What is needed of `CudaIpcHub`, a `Hub`.

    Before it tells that a peer is gone, nothing on the GPU waits for that peer any more. It sends
    away whoever is there when a kernel found other rows than a unit's.
    """

    def peer_index(self, peer: bytes) -> int | None:
        """Of an attached peer in the table of slabs; None when it is gone already."""

    @property
    def num_refused(self) -> int:
        """See `Hub`."""

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Hub`; arrivals come by doorbell."""

    def expel(self, reason: str) -> list[Event]:
        """See `Hub`."""


class Rehearses(Protocol):
    """What is needed of `Rehearsal`."""

    def run(self) -> None:
        """Go the way from a doorbell to a launch, so that the core keeps it in its caches."""


class LooksAtDevice(Protocol):
    """Slow looks at the device, a few times a second; may raise `DeviceFailed`."""

    def look(self, *, is_busy: bool) -> None:
        """`is_busy` while units are in flight."""


class DeviceLoop:
    """Serves one rank until `should_stop` says so; launches into the current stream.

    Args:
        hub: Of this rank.
        units: Launches what the order says.
        board: Counters.
        order: Decides what comes next.
        should_stop: Asked at every turn.
        timeline: Or None.
        predictor: What may count as arrived.
        device: Asked whether all is well.
        rehearsal: Run while this loop is awake and has nothing to do; or None.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        hub: DeviceHub,
        units: DeviceUnits,
        board: Board,
        order: RankOrder,
        should_stop: Callable[[], bool],
        timeline: MlpTimeline | None = None,
        *,
        predictor: Predictor,
        device: LooksAtDevice | None = None,
        rehearsal: Rehearses | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = hub
        self._units = units
        self._board = board
        self._cells = board.cells
        self._order = order
        self._should_stop = should_stop
        self._timeline = timeline
        self._predictor = predictor
        self._device = device
        self._rehearsal = rehearsal
        self._rehearse_at_s = 0.0
        self._clock = clock
        self._reception = Reception(hub, board, order, self, timeline, clock)
        self._in_flight = InFlight(board, timeline)
        self._indices: dict[Hashable, int] = {}  # of attached peers in the table
        self._quiet: set[Hashable] = set()  # those that said that no step is to come
        self._waiting: set[Member] = set()  # arrived, predicted ones included, and not launched
        self._unit: Unit | None = None  # whose launches have begun
        self._parts: deque[list[Member]] = deque()  # of it, not launched yet
        self._asked_s = 0.0  # when the order named it
        self._active_s = 0.0  # when something happened last
        self._look_at_s = 0.0

    def run(self) -> None:
        """Turn until told to stop, then let what is in flight end."""
        self._cells[Counter.STATE] = State.SERVING
        with torch.inference_mode():
            while not self._should_stop():
                self.turn()
        self._cells[Counter.STATE] = State.STOPPING
        self.drain()
        self._show()

    def turn(self) -> None:
        """Take what has happened, and launch what may run."""
        started_ns = time.monotonic_ns()
        self._cells[Counter.TURNED_AT_NS] = started_ns
        timeline = self._timeline
        num_waiting = len(self._waiting) if timeline is not None else 0
        events = self._hub.poll(self._may_sleep_s())
        if events:
            self._active_s = self._clock()
            self._note_idleness(events)
            self._reception.take_all(events)
        if not self._in_flight:
            self._cells[Counter.WAIT_NS] += time.monotonic_ns() - started_ns
            if timeline is not None:
                timeline.waited(started_ns, num_waiting)
        else:
            self._observe()
        while self._units.num_in_flight < RUN_AHEAD and self._launch_next():
            self._active_s = self._clock()
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._look(now_s)
        if self._rehearsal is not None and not self._in_flight:
            self._rehearse(self._rehearsal, now_s)

    def drain(self) -> None:
        """Let units in flight end, by giving up their members if need be.

        Raises:
            AfdError: They do not end even so.
        """
        if self._ends_within(DRAIN_S):
            return
        self._reception.expel("this MLP server stops")
        if not self._ends_within(DRAIN_S):
            raise AfdError(f"{len(self._in_flight)} expert runs on the GPU do not end")

    def _ends_within(self, limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        while self._in_flight and time.monotonic() < deadline_s:
            self._observe()
            time.sleep(NAP_S / 10)
        return not self._in_flight

    # What happens

    @property
    def num_waiting(self) -> int:
        """See `KeepsExchanges`."""
        return len(self._waiting)

    def attached(self, event: PeerAttached) -> None:
        """See `KeepsExchanges`."""
        self._predictor.forget(event.peer)
        index = self._hub.peer_index(event.peer)
        if index is not None:  # else its end is told next
            self._indices[event.peer] = index

    def arrived(self, exchange: Exchange, now_s: float) -> None:
        """See `KeepsExchanges`; the doorbell of an exchange that was predicted says nothing new."""
        member = exchange.member
        if member.peer not in self._indices:
            return
        self._quiet.discard(member.peer)
        arrivals = self._predictor.arrived(member)
        if self._timeline is not None and member in arrivals:
            self._timeline.arrived(member)
        self._take_arrivals(arrivals, now_s)

    def gone(self, peer: bytes) -> None:
        """See `KeepsExchanges`."""
        self._indices.pop(peer, None)
        self._predictor.forget(peer)
        self._waiting = {member for member in self._waiting if member.peer != peer}
        self._quiet.discard(peer)

    def _note_idleness(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Announced(peer=peer, message=StepIntent()):
                    self._quiet.discard(peer)
                case Announced(peer=peer, message=Withdrawal()):
                    self._quiet.add(peer)
                case _:
                    pass

    def _take_arrivals(self, members: Sequence[Member], now_s: float) -> None:
        for member in members:
            self._waiting.add(member)
            self._order.arrived(member, now_s)

    # What is launched

    def _launch_next(self) -> bool:
        """Launch one unit, or a part of one that is too large; returns whether there was any."""
        begun_ns = time.monotonic_ns()
        if self._unit is None:
            self._asked_s = self._clock()
            self._unit = self._order.next_unit(self._asked_s)
            if self._unit is None:
                return False
            self._parts.extend(parts_of(self._unit, self._units.buckets.max_rows))
        members = [each for each in self._parts.popleft() if each.peer in self._indices]
        if members:
            self._launch(self._unit, members, begun_ns)
        if not self._parts:
            unit, self._unit = self._unit, None
            self._end(unit)
        return True

    def _launch(self, unit: Unit, members: list[Member], begun_ns: int) -> None:
        launch = launch_of(unit, members, self._indices)
        is_replay = self._units.launch(launch)
        self._cells[Counter.GRAPH_RUNS if is_replay else Counter.EAGER_RUNS] += 1
        self._in_flight.add(
            self._units.last_ticket, unit, members, launch.num_rows, begun_ns=begun_ns
        )

    def _end(self, unit: Unit) -> None:
        """The replies of the whole unit are enqueued."""
        # NOTE: a unit's time on the host says nothing of its time on the GPU. Finished at the very
        # time at which it was begun, it is not measured, and prefill goes in pieces of one size.
        self._order.finished(unit, self._asked_s)
        if unit.is_last_piece:
            self._waiting.difference_update(unit.members)
            self._cells[Counter.WAITING] = len(self._waiting)
        if not unit.is_prefill:
            here = [member for member in unit.members if member.peer in self._indices]
            self._take_arrivals(self._predictor.enqueued(here), self._clock())

    def _rehearse(self, rehearsal: Rehearses, now_s: float) -> None:
        # NOTE: behind a unit that waits for rows, launches would pile up.
        if now_s >= self._rehearse_at_s and now_s < self._active_s + SPIN_S:
            rehearsal.run()
            self._rehearse_at_s = self._clock() + REHEARSE_S

    # What is seen of the device

    def _observe(self) -> None:
        if self._in_flight.done(self._units.exchange.num_done):
            self._active_s = self._clock()

    def _look(self, now_s: float) -> None:
        """What takes longer than a launch and can wait."""
        self._look_at_s = now_s + LOOK_S
        self._show()
        if self._device is not None:
            self._device.look(is_busy=bool(self._in_flight))

    def _show(self) -> None:
        self._cells[Counter.WAITING] = len(self._waiting)
        self._cells[Counter.REFUSED] = self._hub.num_refused
        self._order.show(self._board)

    def _may_sleep_s(self) -> float:
        if self._in_flight or self._unit is not None:
            return 0.0
        now_s = self._clock()
        if now_s < self._active_s + SPIN_S:
            return 0.0
        wake_at_s = self._order.wake_at_s(now_s)
        nap_s = NAP_S if self._indices.keys() - self._quiet else IDLE_TURN_S
        return nap_s if wake_at_s is None else min(nap_s, max(0.0, wake_at_s - now_s))
