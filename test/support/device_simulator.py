"""GPUs, attention servers and hubs as small models, for the loop that enqueues units ahead.

A device runs what was submitted strictly in order and stands still while the rows of a member that
lives are not there. An attention server is its program of sends and waits; whatever can go on is
chosen at random. The simulation fails where a rank enqueues a wait for rows that need a reply that
is not enqueued in front of it, and where nothing can go on though somebody is not done.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from sglang_afd.mlp.board import Board
from sglang_afd.mlp.device_loop import RUN_AHEAD, DeviceLoop
from sglang_afd.mlp.device_units import DeviceUnits
from sglang_afd.mlp.rank_order import make_rank_order
from sglang_afd.mlp.row_buckets import RowBuckets
from sglang_afd.protocol.messages import Dispatch, Kind, RunUnit, StepIntent, Withdrawal
from sglang_afd.rounds.prediction import Predictor
from sglang_afd.transport.base import (
    Announced,
    Arrived,
    Event,
    Exchange,
    FollowerJoined,
    LeaderFound,
    Ordered,
    PeerAttached,
    PeerGone,
)
from sglang_afd.transport.cuda_ipc.unit_ring import UnitMemberRef

LAYERS = (1, 2, 4, 5)
MAX_UNIT_ROWS = 640
TURN_S = 20e-6


@dataclass(frozen=True, kw_only=True)
class Request:
    """What lies in a slot."""

    step: int
    layer_id: int
    micro_batch_id: int
    num_rows: int
    kind: Kind
    num_micro_batches: int


@dataclass
class Slot:
    request: Request | None = None
    replied: set[int] = field(default_factory=set)
    is_whole: bool = True


def program(rng: random.Random, num_steps: int) -> list[tuple[str, Request]]:
    """The sends and waits of some steps, in the order of one stream."""
    operations: list[tuple[str, Request]] = []
    for step in range(1, num_steps + 1):
        is_prefill = rng.random() < 0.25
        number = rng.choice((1, 1, 2, 3))
        parts = [
            Request(
                step=step,
                layer_id=LAYERS[0],
                micro_batch_id=part,
                num_rows=rng.choice((1, 7, 600)) if is_prefill else rng.randint(1, 300),
                kind=Kind.PREFILL if is_prefill else Kind.DECODE,
                num_micro_batches=number,
            )
            for part in range(number)
        ]
        operations += [("send", part) for part in parts]
        for layer_id, following in zip(LAYERS, (*LAYERS[1:], None), strict=True):
            for part in parts:
                operations.append(("wait", replace(part, layer_id=layer_id)))
                if following is not None:
                    operations.append(("send", replace(part, layer_id=following)))
    return operations


class Attn:
    """One attention server."""

    def __init__(self, number: int, world: World, num_steps: int) -> None:
        self.number, self.world = number, world
        self.operations = program(world.rng, num_steps)
        self.at = 0  # the next operation
        self.slots = [Slot() for _ in range(3)]
        self.sessions = 0
        self.peer = b""
        self.is_dead = False
        self.gone_on: set[int] = set()  # ranks that were told that this session is over
        self.attach_in = 0

    @property
    def is_done(self) -> bool:
        return self.is_dead or self.at == len(self.operations)

    def attach(self) -> None:
        """A new session: every rank hears of it, and of what is pending."""
        self.sessions += 1
        self.peer = f"{self.number}.{self.sessions}".encode()
        epoch = self.world.next_epoch()
        for rank in self.world.ranks:
            rank.hub.open(self, epoch)
        for slot in self.slots:
            if slot.request is not None and not slot.is_whole:
                slot.replied.clear()
                self._ring(slot.request)

    def leave(self) -> None:
        """The session ends; each rank hears of it at a time of its own."""
        peer, self.peer = self.peer, b""
        for rank in self.world.ranks:
            rank.hub.close_later(peer)

    def advance(self) -> bool:
        """One operation, where that can be done."""
        if self.is_dead or not self.peer or self.is_done:
            return False
        name, request = self.operations[self.at]
        slot = self.slots[request.micro_batch_id]
        if name == "wait":
            if not slot.is_whole:
                return False
            assert slot.request == request, "the reply is that of another exchange"
        else:
            assert slot.is_whole, "one exchange in a slot"
            slot.request, slot.is_whole = request, False
            slot.replied.clear()
            is_first = request.layer_id == LAYERS[0]
            if is_first and request.micro_batch_id == 0:
                self._announce(request)
            if self.world.rings_always or is_first or request.kind is Kind.PREFILL:
                self._ring(request)
        self.at += 1
        if self.is_done:
            self.world.tell(0, self.peer, Withdrawal(epoch=0, step=request.step + 1))
        return True

    def needs(self, request: Request) -> list[Request]:
        """Whose replies must come before this exchange is sent, from where the server is now."""
        waits = []
        for name, other in self.operations[self.at :]:
            if name == "send" and other == request:
                return waits
            if name == "wait":
                waits.append(other)
        slot = self.slots[request.micro_batch_id]
        if slot.request == request:
            return []
        raise AssertionError(f"{request} never comes")

    def _announce(self, request: Request) -> None:
        intent = StepIntent(
            epoch=0,
            step=request.step,
            num_rows=request.num_rows,
            num_micro_batches=request.num_micro_batches,
            kind=request.kind,
        )
        self.world.tell(0, self.peer, intent)

    def _ring(self, request: Request) -> None:
        for rank in self.world.ranks:
            rank.hub.ring(self.peer, request)


@dataclass
class Session:
    """One peer's row in a rank's table."""

    attn: Attn
    peer: bytes
    epoch: int
    is_alive: bool = True


class SimHub:
    """One rank's hub; it has the table, too."""

    num_refused = 0

    def __init__(self, rank: int, world: World) -> None:
        self.rank, self.world = rank, world
        self.table: list[Session] = []
        self.inbox: deque[Event] = deque()
        self.leaving: list[bytes] = []

    def poll(self, timeout_s: float) -> list[Event]:
        events = []
        while self.inbox and self.world.rng.random() < 0.8:
            event = self.inbox.popleft()
            if isinstance(event, PeerGone):
                self._bury(event.peer)
            events.append(event)
        return events

    def peer_index(self, peer: bytes) -> int | None:
        session = self._session(peer)
        return self.table.index(session) if session is not None and session.is_alive else None

    def expel(self, reason: str) -> list[Event]:
        gone: list[Event] = []
        for session in self.table:
            if session.is_alive:
                self._bury(session.peer)
                gone.append(PeerGone(peer=session.peer, server_id="", reason=reason))
        return gone

    def order(self, unit: RunUnit) -> None:
        for rank in self.world.ranks[1:]:
            rank.hub.inbox.append(Ordered(order=unit))

    def open(self, attn: Attn, epoch: int) -> None:
        self.table.append(Session(attn, attn.peer, epoch))
        self.inbox.append(PeerAttached(peer=attn.peer, server_id=str(attn.number), epoch=epoch))

    def ring(self, peer: bytes, request: Request) -> None:
        session = self._session(peer)
        assert session is not None, "it rings under its session"
        header = Dispatch(
            epoch=session.epoch,
            step=request.step,
            layer_id=request.layer_id,
            micro_batch_id=request.micro_batch_id,
            num_rows=request.num_rows,
            kind=request.kind,
            num_micro_batches=request.num_micro_batches,
        )
        rows: Any = None  # the loop does not look at them
        self.inbox.append(Arrived(exchange=Exchange(peer=peer, header=header, rows=rows)))

    def close_later(self, peer: bytes) -> None:
        self.leaving.append(peer)

    def notice(self) -> bool:
        """Hear that one session is over."""
        if not self.leaving:
            return False
        peer = self.leaving.pop(0)
        self.inbox.append(PeerGone(peer=peer, server_id="", reason="detached"))
        return True

    def has_heard_of(self, peer: bytes) -> bool:
        return peer not in self.leaving

    def _session(self, peer: bytes) -> Session | None:
        return next((session for session in self.table if session.peer == peer), None)

    def _bury(self, peer: bytes) -> None:
        session = self._session(peer)
        if session is not None and self.world.marks_dead:
            session.is_alive = False


@dataclass(frozen=True)
class Submitted:
    layer_id: int
    members: Sequence[UnitMemberRef]
    requests: Sequence[Request]
    is_last_piece: bool


class SimExchange:
    """`UnitExchange` and the device behind it."""

    def __init__(self, hub: SimHub) -> None:
        self.hub = hub
        self.queue: deque[Submitted] = deque()
        self.num_submitted = self.num_done = 0
        self.sizes: list[int] = []  # peers of each decode unit
        self._last: Submitted | None = None

    def submit(
        self,
        layer_id: int,
        members: Sequence[UnitMemberRef],
        *,
        first_row: int = 0,
        num_rows: int | None = None,
        is_last_piece: bool = True,
    ) -> int:
        assert self.num_submitted - self.num_done < RUN_AHEAD, "the loop runs too far ahead"
        requests = [self._request_of(layer_id, member, num_rows is None) for member in members]
        self._last = Submitted(layer_id, members, requests, is_last_piece)
        self.num_submitted += 1
        if num_rows is None:
            self.sizes.append(len(members))
        return self.num_submitted

    def pull(self, bucket: int) -> Any:
        assert self._last is not None, "pull comes after submit"
        return SimpleNamespace(bucket=bucket)

    def push(self, partial: Any, bucket: int) -> None:
        assert self._last is not None, "push comes after submit"
        self.queue.append(self._last)
        self._last = None

    def execute(self) -> bool:
        """Run the unit in front, if it does not have to wait."""
        if not self.queue:
            return False
        unit = self.queue[0]
        sessions = [self.hub.table[member.peer_index] for member in unit.members]
        pairs = list(zip(sessions, unit.requests, strict=True))
        if any(session.is_alive and not self._is_here(session, one) for session, one in pairs):
            return False
        self.queue.popleft()
        for session, request in pairs:
            if session.is_alive and unit.is_last_piece and session.attn.peer == session.peer:
                self._reply(session.attn.slots[request.micro_batch_id])
        self.num_done += 1
        return True

    def _request_of(self, layer_id: int, member: UnitMemberRef, is_decode: bool) -> Request:
        """Find what the unit is for, and check that it may be waited for here."""
        session = self.hub.table[member.peer_index]
        attn = session.attn
        sent = attn.slots[member.slot].request
        if sent is not None and sent.layer_id == layer_id and self._is_here(session, sent):
            return sent
        coming = [one for name, one in attn.operations[attn.at :] if name == "send"]
        request = next(
            (
                one
                for one in coming
                if (one.layer_id, one.micro_batch_id) == (layer_id, member.slot)
            ),
            None,
        )
        if attn.is_dead or attn.peer != session.peer:
            return request or Request(
                step=-1,
                layer_id=layer_id,
                micro_batch_id=member.slot,
                num_rows=member.num_rows,
                kind=Kind.DECODE,
                num_micro_batches=1,
            )
        assert is_decode, "prefill is never waited for"
        assert request is not None, "rows are waited for that never come"
        enqueued = [one for unit in self.queue for one in unit.requests]
        for needed in attn.needs(request):
            slot = attn.slots[needed.micro_batch_id]
            has_replied = slot.request == needed and self.hub.rank in slot.replied
            assert needed in enqueued or has_replied, (
                f"rank {self.hub.rank} waits for {request}, which needs a reply to {needed}"
            )
        assert request.num_rows == member.num_rows
        return request

    def _is_here(self, session: Session, request: Request) -> bool:
        slot = session.attn.slots[request.micro_batch_id]
        return (
            session.attn.peer == session.peer
            and slot.request == request
            and self.hub.rank not in slot.replied
        )

    def _reply(self, slot: Slot) -> None:
        assert self.hub.rank not in slot.replied, "one reply of each rank"
        slot.replied.add(self.hub.rank)
        slot.is_whole = len(slot.replied) == len(self.hub.world.ranks)


class _Experts:
    def run_on_device(self, layer_id: int, rows: Any) -> Any:
        return rows


class Rank:
    """One MLP rank with its loop."""

    def __init__(self, number: int, world: World, predictor: Predictor) -> None:
        self.hub = SimHub(number, world)
        self.device = SimExchange(self.hub)
        order = make_rank_order(
            self.hub.order,
            LAYERS,
            rank=number,
            ep_size=world.num_ranks,
            has_rounds=world.has_rounds,
        )
        units = DeviceUnits(self.device, _Experts(), RowBuckets((), MAX_UNIT_ROWS))
        self.board = Board(4)
        self.loop = DeviceLoop(
            self.hub,
            units,
            self.board,
            order,
            lambda: False,
            predictor=predictor,
            clock=world.clock,
        )


class World:
    """Everything; `run` ends when every attention server that lives is done.

    Args:
        seed: Of all that is random.
        num_attn: Attention servers.
        num_ranks: MLP ranks.
        num_steps: Of each attention server.
        has_rounds: Rounds, or first come, first served.
        rings_always: Do doorbells tell of every exchange?
        deaths: Attention servers that die somewhere in their steps.
        losses: Sessions that end, after which the server attaches again.
        make_predictor: To plant a fault.
        marks_dead: False plants one: what is gone is waited for.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_attn: int = 3,
        num_ranks: int = 1,
        num_steps: int = 5,
        has_rounds: bool = True,
        rings_always: bool = True,
        deaths: int = 0,
        losses: int = 0,
        make_predictor: Callable[[], Predictor] | None = None,
        marks_dead: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.num_ranks, self.has_rounds = num_ranks, has_rounds
        self.rings_always, self.marks_dead = rings_always, marks_dead
        self._epoch = 0
        make = make_predictor or (lambda: Predictor(LAYERS, predicts=has_rounds))
        self.ranks = [Rank(number, self, make()) for number in range(num_ranks)]
        self.attns = [Attn(number, self, num_steps) for number in range(num_attn)]
        self._deaths, self._losses = deaths, losses
        if has_rounds:
            for number in range(1, num_ranks):
                self.ranks[0].hub.inbox.append(FollowerJoined(rank=number))
                self.ranks[number].hub.inbox.append(LeaderFound())

    def clock(self) -> float:
        return self.now_s

    def next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def tell(self, rank: int, peer: bytes, message: StepIntent | Withdrawal) -> None:
        self.ranks[rank].hub.inbox.append(Announced(peer=peer, message=message))

    def run(self, most_turns: int = 400_000) -> None:
        """Until all are done.

        Raises:
            AssertionError: Nothing goes on, or a rule was broken.
        """
        idle = 0
        for _ in range(most_turns):
            if all(attn.is_done for attn in self.attns):
                return self._settle()
            self.now_s += TURN_S
            idle = 0 if self._act() else idle + 1
            if idle > 2000:
                self.now_s += 0.1  # every window and every patience ends
            assert idle < 6000, self._state()
        raise AssertionError("too slow: " + self._state())

    def _act(self) -> bool:
        """One thing that may happen; returns whether anything did."""
        rng = self.rng
        what = rng.random()
        if what < 0.35:
            return self._attn_acts(rng.choice(self.attns))
        rank = rng.choice(self.ranks)
        if what < 0.6:
            return rank.device.execute()
        if what < 0.62:
            return rank.hub.notice()
        before = (rank.device.num_submitted, len(rank.hub.inbox))
        rank.loop.turn()
        return before != (rank.device.num_submitted, len(rank.hub.inbox))

    def _attn_acts(self, attn: Attn) -> bool:
        if attn.is_dead or attn.is_done:
            return False
        if not attn.peer:
            if all(rank.hub.has_heard_of(peer) for rank in self.ranks for peer in self._old(attn)):
                attn.attach()
                return True
            return False
        if self._deaths and self.rng.random() < 0.01:
            self._deaths -= 1
            attn.is_dead = True
            attn.leave()
            return True
        if self._losses and self.rng.random() < 0.01:
            self._losses -= 1
            attn.leave()
            return True
        return attn.advance()

    def _old(self, attn: Attn) -> list[bytes]:
        return [f"{attn.number}.{session}".encode() for session in range(1, attn.sessions + 1)]

    def _settle(self) -> None:
        """What is enqueued for those that died ends as well."""
        for _ in range(5000):
            self.now_s += TURN_S
            for rank in self.ranks:
                rank.hub.notice()
                rank.loop.turn()
                rank.device.execute()
        for rank in self.ranks:
            assert not rank.device.queue, "units are left on a device: " + self._state()

    def _state(self) -> str:
        attns = [
            f"attn {attn.number} at {attn.operations[attn.at]}"
            for attn in self.attns
            if not attn.is_done
        ]
        fronts = [
            f"rank {rank.hub.rank} stands before {rank.device.queue[0]}"
            for rank in self.ranks
            if rank.device.queue
        ]
        return "nothing goes on: " + "; ".join(attns + fronts)
