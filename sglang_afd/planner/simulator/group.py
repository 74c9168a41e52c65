"""One copy of the experts and its attention servers, event by event, under the real round logic."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from sglang_afd.planner.simulator.disturbance import Failure, Lost
from sglang_afd.planner.simulator.plan import RankCosts
from sglang_afd.planner.simulator.ranks import FollowingRanks, PlayedRanks
from sglang_afd.planner.simulator.server import Server, Service
from sglang_afd.planner.simulator.timeline import Interval, Span
from sglang_afd.rounds.counters import RoundCounters
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.rounds import Rounds
from sglang_afd.rounds.units import Intent, Member, Unit, UnitSource

US = 1e-6
# Rows that the round in flight waits for change nothing before the last of them is here, but for
# when the missing are parked: later than `min_park_s` after an arrival. So the rounds need to be
# asked only once in half of that time.
_ASK_US = RoundOptions().min_park_s / US / 2


class Kind(IntEnum):
    """What happens at a time."""

    ARRIVE, DONE, FOLLOW, START, FAIL, NOTICE, RETURN, IDLE = range(8)


@dataclass(slots=True)
class Running:
    """The unit that rank 0 runs."""

    unit: Unit
    start_us: float
    last_arrived_us: float
    arrived_us: list[float]


@dataclass(kw_only=True, slots=True)
class GroupOptions:
    """How a group is played."""

    make_source: Callable[[Sequence[int]], UnitSource] = Rounds
    num_ranks: int = 1
    num_steps: int  # decode steps of every server, with those that warm up
    # Play every rank with the queue that a real one has, and ask rank 0 after every event. The
    # short cuts give the same times and are several times faster; a test compares them.
    is_literal: bool = False
    span: Span | None = None
    notice_us: float = 0.0  # see Disturbance


@dataclass(slots=True)
class Group:
    """Runs until every server that is not lost has its steps."""

    costs: RankCosts
    servers: list[Server]
    options: GroupOptions
    failures: Sequence[tuple[int, Failure]] = ()  # with their number, which orders equal times
    now_us: float = 0.0
    num_events: int = 0
    busy_from_us: float = 0.0  # when the last server had warmed up
    num_units: int = 0  # decode units since then
    num_unit_peers: int = 0
    intervals: list[Interval] = field(default_factory=list)
    ranks: FollowingRanks | PlayedRanks = field(init=False)
    source: UnitSource = field(init=False)
    _busy_before_us: list[float] = field(init=False)
    _heap: list[tuple[float, int, Kind, Any]] = field(default_factory=list)
    _pushed: int = 0
    _running: Running | None = None
    _wake_us: float = math.inf
    _ask_us: float = 0.0
    _awaited: set[tuple[Any, int, int]] = field(default_factory=set)
    _epoch: int = 0  # of the MLP side; what was sent in an earlier one is void
    _attachments: int = 0
    _epochs: dict[Any, int] = field(default_factory=dict)
    _num_lost_ranks: int = 0
    _down_from_us: float = 0.0
    _has_lost_leader: bool = False
    _has_lost: bool = False  # an attention server, at some time
    _remaining: set[int] = field(default_factory=set)
    _cold: set[int] = field(default_factory=set)
    _downs: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_ranks = self.options.num_ranks
        layers = range(self.servers[0].num_layers)
        self.source = self.options.make_source(layers)
        if self.options.is_literal:
            has_rounds = isinstance(self.source, Rounds)
            self.ranks = PlayedRanks(num_ranks, self.costs, has_rounds=has_rounds)
        else:
            self.ranks = FollowingRanks(num_ranks, self.costs)
        self._busy_before_us = [0.0] * num_ranks
        self._remaining = {server.number for server in self.servers}
        self._cold = {server.number for server in self.servers if server.warm_steps}
        for server in self.servers:
            server.downs = self._downs
            server.span = self.options.span

    @property
    def counters(self) -> RoundCounters:
        """Of rank 0; without rounds there are none."""
        return self.source.counters if isinstance(self.source, Rounds) else RoundCounters()

    def play(self, starts_us: Sequence[float]) -> None:
        """From the start of each server to the end."""
        for server, start_us in zip(self.servers, starts_us, strict=True):
            server.idle_until(start_us)
            self._attach(server)
            self._push(start_us, Kind.START, (server, server.incarnation))
        for number, failure in self.failures:
            self._push(failure.at_us, Kind.FAIL, (number, failure))
        while self._remaining and self._next_us < math.inf:
            self.now_us = self._next_us
            must_ask = self._wake_us <= self.now_us
            while self._heap and self._heap[0][0] <= self.now_us:
                _, _, kind, what = heapq.heappop(self._heap)
                self.num_events += 1
                if kind is Kind.ARRIVE:  # nearly all are
                    must_ask |= self._arrive(*what)
                else:
                    must_ask |= self._happens(kind, what)
            if must_ask and self._running is None and not self._is_down:
                self._go()

    @property
    def _is_down(self) -> bool:
        return self._num_lost_ranks > 0

    @property
    def _next_us(self) -> float:
        return min(self._heap[0][0], self._wake_us) if self._heap else self._wake_us

    @property
    def is_stuck(self) -> bool:
        """Whether it ended since nothing can happen any more."""
        return bool(self._remaining)

    def busy_shares(self) -> list[float]:
        """Of each rank, since all servers were warm."""
        lasted_us = max(self.now_us - self.busy_from_us, 1e-9)
        busy_us = self.ranks.busy_us
        return [
            (busy - before) / lasted_us
            for busy, before in zip(busy_us, self._busy_before_us, strict=True)
        ]

    def _push(self, at_us: float, kind: Kind, what: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at_us, self._pushed, kind, what))

    def _happens(self, kind: Kind, what: Any) -> bool:
        """Whether rank 0 has to be asked what to run."""
        match kind:
            case Kind.DONE:
                self._done(what)
            case Kind.FOLLOW:
                self._follow(what)
                return False
            case Kind.START:
                self._start(*what)
            case Kind.FAIL:
                self._fail(*what)
            case Kind.NOTICE:
                self._notice(*what)
            case Kind.IDLE:
                self.source.withdrawn(what.number, self.now_us * US, what.step + 1)
            case Kind.RETURN:
                self._return(what)
        return True

    # Attention servers

    def _attach(self, server: Server) -> None:
        self._attachments += 1
        self._epochs[server.number] = epoch = self._attachments
        self.source.peer_attached(server.number, epoch, self.now_us * US)
        self.ranks.attached(server.number, epoch, self.now_us)

    def _start(self, server: Server, incarnation: int) -> None:
        if incarnation != server.incarnation:
            return
        if not server.begin(self.now_us):
            self._remaining.discard(server.number)
            self.source.withdrawn(server.number, self.now_us * US, server.step + 1)
            return
        assert server.plan is not None, "a step was begun"
        if not self._is_down and not server.plan.goes_idle:
            intent = Intent(
                peer=server.number,
                step=server.step + 1,
                num_rows=1,
                is_prefill=server.plan.next_is_prefill,
            )
            self.source.announced(intent, self.now_us * US)
        self._advance(server)

    def _advance(self, server: Server) -> None:
        end_us = server.advance(self._emit)
        if end_us is None:
            return
        if server.num_ended >= self.options.num_steps:
            self._remaining.discard(server.number)
        if server.number in self._cold and server.num_ended >= server.warm_steps:
            self._cold.discard(server.number)
            if not self._cold:
                self.busy_from_us = self.now_us
                self._busy_before_us = list(self.ranks.busy_us)
        assert server.plan is not None, "a step was begun"
        if server.plan.goes_idle:
            self._push(end_us, Kind.IDLE, server)
        what = (server, server.incarnation)
        next_us = max(end_us + server.plan.outside_us, server.plan.next_from_us)
        self._push(next_us, Kind.START, what)

    def _emit(self, server: Server, op: int, leaves_us: float) -> None:
        plan = server.plan
        assert plan is not None, "a step was begun"
        member = server.member(op)
        stamp = (self._epoch, server.incarnation)
        out_us = plan.out_us[op]
        self._push(leaves_us + out_us[0], Kind.ARRIVE, (0, server, member, stamp))
        for rank in range(1, self.options.num_ranks if self.options.is_literal else 1):
            at_us = leaves_us + out_us[min(rank, len(out_us) - 1)]
            self._push(at_us, Kind.ARRIVE, (rank, server, member, stamp))

    def _arrive(self, rank: int, server: Server, member: Member, stamp: tuple[int, int]) -> bool:
        if stamp != (self._epoch, server.incarnation) or self._is_down:
            return False
        if rank:
            self._take_from_follower(self.ranks.arrived(rank, member, self.now_us))
            return False
        server.arrived(member.micro_batch_id, self.now_us)
        self.source.arrived(member, self.now_us * US)
        if self._running is not None:
            return False
        return not self._is_one_of_many(member)

    def _is_one_of_many(self, member: Member) -> bool:
        key = (member.peer, member.layer_id, member.micro_batch_id)
        if key not in self._awaited:
            return False
        self._awaited.discard(key)
        if not self._awaited or self.now_us >= self._ask_us:
            return False
        self._wake_us = min(self._wake_us, self._ask_us)
        return True

    # Rank 0

    def _go(self) -> None:
        now_us = self.now_us
        self._wake_us = math.inf
        self._awaited = set()
        unit = self.source.next_unit(now_us * US)
        if unit is not None:
            self._run(unit)
            return
        wake_s = self.source.wake_at_s(now_us * US)
        if wake_s is not None:
            # Never at the same instant again: time must move on.
            self._wake_us = max(wake_s / US, now_us + 1e-3)
        if isinstance(self.source, Rounds) and not self.options.is_literal:
            self._awaited = set(self.source.awaited)
            self._ask_us = now_us + _ASK_US

    def _run(self, unit: Unit) -> None:
        arrived_us = [self._server(m).arrived_us(m.micro_batch_id) for m in unit.members]
        now_us = self.now_us
        self._running = Running(unit, now_us, max(arrived_us), arrived_us)
        for at_us, rank in self.ranks.ordered(unit, self._epochs, self._rows_at, now_us):
            self._push(at_us, Kind.FOLLOW, (rank, self._epoch))
        self._push(self.ranks.leader_ends_us, Kind.DONE, (unit, self._epoch))
        self._show(unit, self.now_us, self.ranks.leader_ends_us)
        if not self._cold and not unit.is_prefill:
            self.num_units += 1
            self.num_unit_peers += len(unit.members)

    def _rows_at(self, unit: Unit) -> list[list[float]]:
        """When the ranks have the rows of each member; of a server that is lost nobody waits."""
        rows_at_us = []
        for member in unit.members:
            server = self._server(member)
            if not self._has_lost or server.waits_for(member):
                rows_at_us.append(server.rows_at_us(member.micro_batch_id))
        return rows_at_us

    def _done(self, what: tuple[Unit, int]) -> None:
        unit, epoch = what
        if epoch != self._epoch:
            return
        running, self._running = self._running, None
        assert running is not None and running.unit is unit, "another unit was running"
        self.source.finished(unit, self.now_us * US)
        self.ranks.leader_done(unit, running, self.now_us)
        self._reply()

    def _follow(self, what: tuple[int, int]) -> None:
        rank, epoch = what
        if epoch == self._epoch:
            self._take_from_follower(self.ranks.follow(rank, self.now_us))

    def _take_from_follower(self, wakes: list[tuple[float, int]]) -> None:
        for at_us, rank in wakes:
            self._push(at_us, Kind.FOLLOW, (rank, self._epoch))
        self._reply()

    def _reply(self) -> None:
        for member, running, arrived_us, ends_us in self.ranks.take_answered():
            server = self._server(member)
            if server.waits_for(member):
                service = Service(
                    0.0, arrived_us, running.last_arrived_us, running.start_us, max(ends_us)
                )
                server.replied(member.micro_batch_id, service, ends_us)
                self._advance(server)

    def _server(self, member: Member) -> Server:
        return self.servers[member.peer]  # type: ignore[call-overload, no-any-return]

    def _show(self, unit: Unit, start_us: float, end_us: float) -> None:
        span = self.options.span
        if span is None or not span.has(self._server(unit.members[0]).num_ended):
            return
        name = "prefill" if unit.is_prefill else "run"
        step = self._server(unit.members[0]).num_ended
        where = (step, unit.layer_id, unit.micro_batch_id, len(unit.members))
        self.intervals.append(Interval("mlp 0", name, start_us, end_us, *where))

    # Failures

    def _fail(self, number: int, failure: Failure) -> None:
        back_us = math.inf if failure.back_after_us is None else failure.back_after_us
        if failure.lost is Lost.MLP:
            self._detach_all()
        else:
            server = self.servers[failure.index]
            if not server.is_alive:
                return  # it would come back twice, and take every step twice
            server.lose(self.now_us)
            self._has_lost = True
            self._push(
                self.now_us + self.options.notice_us, Kind.NOTICE, (server, server.incarnation)
            )
            if back_us == math.inf:
                self._remaining.discard(server.number)
                self._cold.discard(server.number)
        if back_us < math.inf:
            self._push(self.now_us + back_us, Kind.RETURN, failure)

    def _detach_all(self) -> None:
        """How many orders the lost rank had run is not known: every exchange begins anew."""
        if self._running is not None:
            self.source.finished(self._running.unit, self.now_us * US)
            self._running = None
        for server in self.servers:
            self.source.peer_gone(server.number, self.now_us * US)
            self.ranks.gone(server.number, self.now_us)
        self.ranks.clear(self.now_us)
        if not self._num_lost_ranks:
            self._down_from_us = self.now_us
        self._num_lost_ranks += 1
        self._epoch += 1
        self._awaited, self._wake_us = set(), math.inf

    def _notice(self, server: Server, incarnation: int) -> None:
        if server.incarnation == incarnation and not server.is_alive:
            self.source.peer_gone(server.number, self.now_us * US)
            self.ranks.gone(server.number, self.now_us)

    def _return(self, failure: Failure) -> None:
        if failure.lost is Lost.ATTENTION:
            server = self.servers[failure.index]
            server.come_back(self.now_us)
            if not self._is_down:
                self._attach(server)
            self._push(self.now_us, Kind.START, (server, server.incarnation))
            return
        self._num_lost_ranks -= 1
        self._has_lost_leader |= failure.index == 0
        if self._is_down:
            return
        self._epoch += 1
        self._downs.append((self._down_from_us, self.now_us))
        if self._has_lost_leader:
            self._has_lost_leader = False
            self.source = self.options.make_source(range(self.servers[0].num_layers))
            self.ranks.leader_changed(self.now_us)
        for server in self.servers:
            if server.is_alive:
                self._attach(server)
                self._send_again(server)

    def _send_again(self, server: Server) -> None:
        for op, left_us in server.pending():
            server.counts.resent += left_us <= self.now_us
            self._emit(server, op, max(left_us, self.now_us))
