"""Attention servers and MLP ranks as plain as can be, which check every rule of the rounds.

Each peer walks through its steps in the order in which greenlets take turns: attention(l, 0), send,
attention(l, 1), send, wait(l, 0), attention(l + 1, 0) ... Messages travel with delays of their own
on every connection, in order. Peers come late, abort, stall, lose their link in the middle of a
step, join, leave and die; intents are lost, late or false. `World.run` raises `RuleBroken` when a
rule is.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from sglang_afd.rounds.follower import FollowerQueue
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.orders import UnitOrder, order_of
from sglang_afd.rounds.rounds import Rounds
from sglang_afd.rounds.units import Intent, Member, Unit, UnitSource

MS = 1e-3
Awaited = list[tuple[Hashable, int, int]]


class RuleBroken(AssertionError):
    """A rule of the rounds does not hold."""


class Leader(UnitSource, Protocol):
    """What the checks look at beside the units."""

    @property
    def awaited(self) -> Awaited:
        """What the round in flight waits for."""

    @property
    def expected(self) -> list[Hashable]:
        """Whom a window would be held open for."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One random schedule; `seed` decides all delays and the choices below."""

    seed: int
    num_peers: int = 3
    num_ranks: int = 1
    num_layers: int = 3
    max_micro_batches: int = 2
    num_steps: int = 3
    prefill: float = 0.1  # chance that a step is a prefill
    zero_rows: float = 0.05  # chance for each micro-batch
    lost_intent: float = 0.2
    late_intent: float = 0.2
    false_intent: float = 0.1  # announces decode, then sleeps without a word
    idle: float = 0.1  # withdraws and sleeps after a step
    lost_withdrawal: float = 0.2
    stall: float = 0.05  # chance for each step: one layer takes far longer than a round
    cut: float = 0.05  # chance for each decode exchange to come in two pieces
    relink: float = 0.05  # chance for each step: the link is lost in the middle, all is sent again
    jump: float = 0.1  # chance that a step number jumps
    repeat: float = 0.02  # chance that a message arrives twice
    crashes: int = 0  # so many peers die
    late_peers: int = 0  # so many join while others decode


@dataclass(eq=False)
class _Op:
    """One exchange of a step."""

    layer_id: int
    micro_batch_id: int
    num_rows: int
    piece: int = 0
    sent: bool = False
    replies: set[int] = field(default_factory=set)  # ranks


class Link:
    """One attachment of a peer to every rank."""

    def __init__(self, peer: Peer, epoch: int) -> None:
        self.peer, self.epoch = peer, epoch
        self.names = [f"{peer.number}.{epoch}@{rank}" for rank in range(peer.world.num_ranks)]
        self.is_lost = False
        self.sent_at = [0.0] * peer.world.num_ranks  # keeps each connection in order


class Peer:
    """One attention server."""

    def __init__(self, world: World, number: int, begins_s: float) -> None:
        self.world, self.number = world, number
        self.link: Link | None = None
        self.step = 0
        self.steps_left = world.scenario.num_steps
        self.is_dead = self.is_done = self.is_withdrawn = False
        self.is_prefill = False
        self.is_running = self.has_new_link = False
        self.queues: list[list[_Op]] = []  # by micro-batch, what is not answered
        self.order: list[_Op] = []  # what is not sent, in the order in which it will be
        self.in_flight: dict[int, _Op] = {}
        self.generation = 0  # voids what was scheduled before a crash or a lost link
        self.next_kind: bool | None = None
        world.at(begins_s, self._attach)

    # Steps

    def _attach(self) -> None:
        world = self.world
        world.num_epochs += 1
        self.link = link = Link(self, world.num_epochs)
        # The peer knows that it is attached when the last rank has said so.
        last = max(world.send_to_rank(link, rank, "attached", None) for rank in world.ranks)
        world.at(last + 0.1 * MS, self._resume if self.is_running else self._begin, self.generation)

    def _begin(self, generation: int) -> None:
        if generation != self.generation or self.is_dead:
            return
        world, scenario, random = self.world, self.world.scenario, self.world.random
        if self.steps_left == 0:
            self._leave()
            return
        self.steps_left -= 1
        self.step += 1 + (random.randrange(1, 50) if random.random() < scenario.jump else 0)
        if self.next_kind is None:
            self._announce(self.step, self._draw_kind())
        self.is_prefill, self.next_kind = bool(self.next_kind), None
        self._draw_ops()
        if random.random() < 0.5 and self.steps_left:  # the scheduler runs one step ahead
            self._announce(self.step + 1, self._draw_kind())
        self.is_running, self.is_withdrawn, self.has_new_link = True, False, False
        if not self.steps_left and self.link is not None:
            world.send_to_rank(self.link, 0, "withdrawn", None)
        self._advance(self._draw_attention_s(), self.generation)
        if random.random() < scenario.relink:
            world.at(world.now + random.uniform(0, 30) * MS, self._lose_link, self.generation)

    def _draw_kind(self) -> bool:
        return self.world.random.random() < self.world.scenario.prefill

    def _announce(self, step: int, is_prefill: bool) -> None:
        scenario, random = self.world.scenario, self.world.random
        self.next_kind = is_prefill
        if random.random() < scenario.lost_intent:
            return
        late = random.uniform(0, 30) * MS if random.random() < scenario.late_intent else 0.0
        self.world.at(self.world.now + late, self._send_intent, step, is_prefill, self.link)

    def _send_intent(self, step: int, is_prefill: bool, link: Link | None) -> None:
        if link is not None and link is self.link:
            self.world.send_to_rank(link, 0, "announced", (step, is_prefill))

    def _draw_ops(self) -> None:
        scenario, random = self.world.scenario, self.world.random
        parts = random.randint(1, scenario.max_micro_batches)
        self.queues = [[] for _ in range(parts)]
        self.order = []
        rows = [
            0 if random.random() < scenario.zero_rows else random.randint(1, 40)
            for _ in range(parts)
        ]
        if self.is_prefill:
            rows = [row * random.choice((1, 10, 100)) for row in rows]
        for layer_id in self.world.layer_ids:
            for part in range(parts):
                pieces = 2 if random.random() < scenario.cut else 1
                for piece in range(pieces):
                    op = _Op(layer_id, part, rows[part], piece)
                    self.queues[part].append(op)
                    self.order.append(op)
        self.stalls_at = random.choice(self.order) if random.random() < scenario.stall else None

    def _draw_attention_s(self) -> float:
        return self.world.random.uniform(0.05, 1.0) * MS

    def _advance(self, wait_s: float, generation: int) -> None:
        """Compute the next exchange in greenlet order as soon as its micro-batch was answered."""
        if self.order and self.order[0].micro_batch_id not in self.in_flight:
            if self.order[0] is self.stalls_at:
                wait_s += self.world.random.uniform(20, 200) * MS
            op = self.order.pop(0)
            self.in_flight[op.micro_batch_id] = op
            self.world.at(self.world.now + wait_s, self._send, op, generation)

    def _send(self, op: _Op, generation: int) -> None:
        if generation != self.generation or self.is_dead or self.link is None:
            return
        op.sent = True
        for rank in self.world.ranks:
            self._send_to(rank, op)
        self._advance(self._draw_attention_s(), generation)

    def _send_to(self, rank: int, op: _Op) -> None:
        assert self.link is not None, "sends only while attached"
        member = Member(
            peer=self.link.names[rank],
            micro_batch_id=op.micro_batch_id,
            step=self.step,
            layer_id=op.layer_id,
            num_rows=op.num_rows,
            num_micro_batches=len(self.queues),
            is_prefill=self.is_prefill,
        )
        self.world.send_to_rank(self.link, rank, "arrived", (member, op))

    def replied(self, link: Link, rank: int, op: _Op) -> None:
        """A rank's partial sum is here."""
        if link is not self.link or self.is_dead:
            return
        if rank in op.replies:
            raise RuleBroken(f"rank {rank} replied twice to {op} of peer {self.number}")
        op.replies.add(rank)
        if len(op.replies) < self.world.num_ranks:
            return
        del self.in_flight[op.micro_batch_id]
        self.queues[op.micro_batch_id].remove(op)
        if any(self.queues):
            if not any(not other.sent for other in self.in_flight.values()):
                self._advance(self._draw_attention_s(), self.generation)
        else:
            self._end_step()

    def _end_step(self) -> None:
        scenario, random, world = self.world.scenario, self.world.random, self.world
        self.is_running = False
        gap_s = random.uniform(0.05, 3.0) * MS
        if random.random() < scenario.idle:
            self.next_kind = None
            self.is_withdrawn = True
            if random.random() >= scenario.lost_withdrawal and self.link is not None:
                world.send_to_rank(self.link, 0, "withdrawn", None)
            gap_s += random.uniform(0, 300) * MS
        elif random.random() < scenario.false_intent:
            self._announce(self.step + 1, False)
            self.next_kind = None
            gap_s += random.uniform(0, 300) * MS
        world.at(world.now + gap_s, self._begin, self.generation)

    # Ends

    def _leave(self) -> None:
        self.is_done = True
        self._drop_link()

    def crash(self) -> None:
        """Die; the ranks notice one by one."""
        if not self.is_done:
            self.is_dead = True
            self._drop_link()

    def _drop_link(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.is_lost = True
            for rank in self.world.ranks:
                self.world.send_to_rank(link, rank, "gone", None)

    def _lose_link(self, generation: int) -> None:
        """The link breaks; after a while a new one takes what was not answered."""
        if generation != self.generation or self.is_dead or not self.is_running:
            return
        self.generation += 1
        self.has_new_link = True
        self._drop_link()
        self.world.at(self.world.now + self.world.random.uniform(1, 40) * MS, self._reattach)

    def _reattach(self) -> None:
        if not self.is_dead:
            self._attach()

    def _resume(self, generation: int) -> None:
        if generation != self.generation or self.is_dead:
            return
        for op in sorted(self.in_flight.values(), key=lambda op: op.micro_batch_id):
            op.replies.clear()
            if op.sent:
                for rank in self.world.ranks:
                    self._send_to(rank, op)
        unsent = [op for op in self.in_flight.values() if not op.sent]
        for op in unsent:
            self.world.at(self.world.now + self._draw_attention_s(), self._send, op, generation)
        if not unsent:
            self._advance(self._draw_attention_s(), generation)

    # What the checks ask

    def will_send(self, rank: int, layer_id: int, micro_batch_id: int) -> bool:
        """Whether these rows come though no rank runs anything more than it was told to already."""
        if not self.is_running or self.is_prefill:
            return False
        at = (layer_id, micro_batch_id)
        for op in self.in_flight.values():
            if (op.layer_id, op.micro_batch_id) == at:
                return True
        # Greenlet order: what comes before must be sent, or answered by a unit already handed out.
        # What is behind the round holds up nothing, since it is run alone as soon as it is here:
        # the second piece of a cut exchange, and micro-batches that a new link brought late.
        busy = {
            part
            for part, op in self.in_flight.items()
            if not (op.piece or self.has_new_link)
            and (self.link, op) not in self.world.handed_out[rank]
        }
        for op in self.order:
            if op.micro_batch_id in busy:
                return False
            if (op.layer_id, op.micro_batch_id) == at:
                return True
            if not (op.piece or self.has_new_link):
                busy.add(op.micro_batch_id)
        return False


class Rank:
    """One MLP rank: runs one unit at a time and checks what it is given."""

    def __init__(self, world: World, number: int, source: UnitSource) -> None:
        self.world, self.number, self.source = world, number, source
        self.running: Unit | None = None
        self.links: dict[Hashable, Link] = {}
        self.here: dict[tuple[Hashable, int], tuple[Member, _Op, float]] = {}
        self.rows_done: dict[tuple[Hashable, int], int] = defaultdict(int)
        self.sequence: list[tuple[int, tuple[tuple[int, int, int, int], ...]]] = []
        self.silent: set[Hashable] = set()  # said that no step is to come
        self.steps: dict[Hashable, int] = {}  # the last of each peer
        self.missed: set[Hashable] = set()  # did not come before the round began

    def take(self, what: str, link: Link, body: object) -> None:
        """One message of a peer."""
        name, now = link.names[self.number], self.world.now
        match what, body:
            case "attached", _:
                self.links[name] = link
                self.source.peer_attached(name, link.epoch, now)
            case "gone", _:
                self.links.pop(name, None)
                self.silent.discard(name)
                self.missed.discard(name)
                self.here = {slot: held for slot, held in self.here.items() if slot[0] != name}
                self.source.peer_gone(name, now)
            case "announced", (int(step), bool(is_prefill)):
                intent = Intent(peer=name, step=step, num_rows=1, is_prefill=is_prefill)
                self.silent.discard(name)
                self.source.announced(intent, now)
            case "withdrawn", _:
                self.silent.add(name)
                self.source.withdrawn(name, now)
            case "arrived", (Member() as member, _Op() as op):
                self._arrived(member, op)
            case "ordered", UnitOrder() as order:
                self.source.ordered(order)  # type: ignore[attr-defined]
        self.turn()

    def _arrived(self, member: Member, op: _Op) -> None:
        slot = (member.peer, member.micro_batch_id)
        if slot in self.here:
            raise RuleBroken(f"the model sent {member} into a slot that is not free")
        self.here[slot] = (member, op, self.world.now)
        if self.steps.get(member.peer) != member.step:
            self.silent.discard(member.peer)
        self.steps[member.peer] = member.step
        self.missed.discard(member.peer)
        self.rows_done[slot] = 0
        self.source.arrived(member, self.world.now)
        if self.world.random.random() < self.world.scenario.repeat:
            self.source.arrived(member, self.world.now)

    def turn(self) -> None:
        """Run what may run; look again when the source says so."""
        if self.running is not None:
            return
        now = self.world.now
        self.world.check_waits(self)
        unit = self._next_unit(now)
        if unit is None:
            if self.source.next_unit(now) is not None:
                raise RuleBroken("nothing may run, and at the same time something may")
            self.world.check_waits(self)
            wakes = self.source.wake_at_s(now)
            if wakes is not None:
                if wakes <= now:
                    raise RuleBroken(f"asks to be asked at {wakes}, which is past at {now}")
                self.world.at(wakes, self.turn)
            return
        self.running = unit
        self._check_unit(unit)
        if not unit.is_prefill:
            self._publish(unit)
        run_s = (0.05 + 0.002 * unit.num_rows) * MS
        self.world.at(now + run_s, self._finish, unit)

    def _next_unit(self, now: float) -> Unit | None:
        if not isinstance(self.source, Rounds):
            return self.source.next_unit(now)
        expected, rounds = self.source.expected, self.source.counters.rounds
        unit = self.source.next_unit(now)
        if self.source.counters.rounds > rounds:
            self.missed.update(expected)
        return unit

    def _check_unit(self, unit: Unit) -> None:
        peers = [member.peer for member in unit.members]
        if len(set(peers)) < len(peers) or not peers:
            raise RuleBroken(f"a peer is twice in {unit}, or nobody is")
        for member in unit.members:
            slot = (member.peer, member.micro_batch_id)
            if slot not in self.here or self.here[slot][0] != member:
                raise RuleBroken(f"rank {self.number} runs {member}, which is not here")
            if (member.layer_id, member.micro_batch_id) != (unit.layer_id, unit.micro_batch_id):
                raise RuleBroken(f"{member} does not belong into {unit}")
        total = sum(member.num_rows for member in unit.members)
        if unit.is_prefill:
            self._check_piece(unit, unit.members[0])
        elif (unit.num_rows, unit.first_row, unit.is_last_piece) != (total, 0, True):
            raise RuleBroken(f"{unit} has not all rows of its members, {total}")

    def _check_piece(self, unit: Unit, member: Member) -> None:
        slot = (member.peer, member.micro_batch_id)
        if unit.first_row != self.rows_done[slot]:
            raise RuleBroken(f"{unit} does not follow row {self.rows_done[slot]}")
        self.rows_done[slot] += unit.num_rows
        if unit.is_last_piece != (self.rows_done[slot] == member.num_rows):
            raise RuleBroken(f"{unit} is wrong about the end of {member}")

    def _publish(self, unit: Unit) -> None:
        names = [
            (self.links[member.peer].epoch, member.step, member.layer_id, member.micro_batch_id)
            for member in unit.members
        ]
        self.sequence.append((unit.sequence, tuple(sorted(names))))
        for member in unit.members:
            _, op, _ = self.here[member.peer, member.micro_batch_id]
            link = self.links[member.peer]
            self.world.handed_out[self.number].add((link, op))
        if self.number == 0:
            epochs = {name: link.epoch for name, link in self.links.items()}
            self.world.publish(order_of(unit, epochs))

    def _finish(self, unit: Unit) -> None:
        self.running = None
        self.source.finished(unit, self.world.now)
        if unit.is_last_piece:
            for member in unit.members:
                self._reply(member)
        self.turn()

    def _reply(self, member: Member) -> None:
        link = self.links.get(member.peer)
        held = self.here.pop((member.peer, member.micro_batch_id), None)
        if link is None or held is None:
            return
        _, op, arrived_s = held
        self.world.served += 1
        self.world.longest_s = max(self.world.longest_s, self.world.now - arrived_s)
        self.world.send_reply(link, self.number, op)


class World:
    """Clock, messages, and the rules.

    Args:
        make_leader: Builds rank 0's source from the layer ids.
        make_follower: Builds another rank's.
    """

    def __init__(
        self,
        scenario: Scenario,
        make_leader: Callable[[list[int]], Leader] | None = None,
        make_follower: Callable[[list[int]], UnitSource] | None = None,
    ) -> None:
        self.scenario, self.random, self.now = scenario, Random(scenario.seed), 0.0
        options = RoundOptions(first_park_s=0.05)
        self.layer_ids = [3 + 2 * layer for layer in range(scenario.num_layers)]
        self.num_ranks = scenario.num_ranks
        self.ranks = range(scenario.num_ranks)
        self.num_epochs = 0
        self.served, self.longest_s = 0, 0.0
        self.handed_out: list[set[tuple[Link | None, _Op]]] = [set() for _ in self.ranks]
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._pushed = 0
        self._ordered_at = [0.0] * scenario.num_ranks
        self.leader: Leader = (
            make_leader(self.layer_ids) if make_leader else Rounds(self.layer_ids, options)
        )
        followers = [
            make_follower(self.layer_ids) if make_follower else FollowerQueue(options)
            for _ in self.ranks[1:]
        ]
        self._ranks = [
            Rank(self, number, source) for number, source in enumerate((self.leader, *followers))
        ]
        late = scenario.num_peers - scenario.late_peers
        self.peers = [
            Peer(self, number, self.random.uniform(0, 5 if number < late else 60) * MS)
            for number in range(scenario.num_peers)
        ]
        for peer in self.peers[: scenario.crashes]:
            self.at(self.random.uniform(0, 80) * MS, peer.crash)

    def at(self, when_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Call something later."""
        self._pushed += 1
        heapq.heappush(self._heap, (when_s, self._pushed, call, arguments))

    def send_to_rank(self, link: Link, rank: int, what: str, body: object) -> float:
        """One message on a connection, after those before it; returns when it arrives."""
        delay_s = self.random.uniform(0.01, 0.3) * MS
        link.sent_at[rank] = max(self.now + delay_s, link.sent_at[rank])
        self.at(link.sent_at[rank], self._ranks[rank].take, what, link, body)
        return link.sent_at[rank]

    def send_reply(self, link: Link, rank: int, op: _Op) -> None:
        """One reply on its way back."""
        delay_s = self.random.uniform(0.01, 0.3) * MS
        self.at(self.now + delay_s, link.peer.replied, link, rank, op)

    def publish(self, order: UnitOrder) -> None:
        """The leader's word to each follower, in order, with a delay of its own."""
        for rank in self.ranks[1:]:
            delay_s = self.random.uniform(0.01, 0.5) * MS
            self._ordered_at[rank] = max(self.now + delay_s, self._ordered_at[rank])
            self.at(self._ordered_at[rank], self._hear, rank, order)

    def _hear(self, rank: int, order: UnitOrder) -> None:
        source = self._ranks[rank].source
        if isinstance(source, FollowerQueue):
            source.ordered(order)
            self._ranks[rank].turn()

    def run(self) -> World:
        """Until nothing happens any more; then everybody must be through."""
        limit_s = self._limit_s()
        while self._heap:
            self.now, _, call, arguments = heapq.heappop(self._heap)
            if self.now > limit_s:
                raise RuleBroken(f"still not at an end after {limit_s:.1f} s: {self._stuck()}")
            call(*arguments)
        if stuck := self._stuck():
            raise RuleBroken(f"nothing happens any more, and yet {stuck} is not through")
        for rank in self._ranks:
            if rank.here:
                raise RuleBroken(f"rank {rank.number} never ran {rank.here}")
        self._check_sequences()
        if self.longest_s > (bound_s := self._starvation_s()):
            raise RuleBroken(f"rows waited for {self.longest_s:.3f} s, more than {bound_s:.3f} s")
        return self

    def _stuck(self) -> list[int]:
        return [peer.number for peer in self.peers if not (peer.is_dead or peer.is_done)]

    @property
    def _step_s(self) -> float:
        """A whole step, each exchange of it with a long prefill beside, and stalled once."""
        scenario = self.scenario
        return 8 * MS * scenario.max_micro_batches * scenario.num_layers * 2 + 200 * MS

    def _starvation_s(self) -> float:
        """The rest of one round, and another up to where the rows are."""
        return 2 * self._step_s

    def _limit_s(self) -> float:
        """Every step alone, with every sleep and window in full."""
        alone_s = self._step_s + (300 + 40 + 500) * MS
        return 1.0 + self.scenario.num_peers * self.scenario.num_steps * alone_s

    # The rules that hold at every moment

    def check_waits(self, rank: Rank) -> None:
        """What every rank waits for, and whom the leader would hold a window open for."""
        self._check_members(rank)
        if rank.number == 0:
            self._check_expected(rank)

    def _check_expected(self, rank: Rank) -> None:
        """Nobody is waited for who is gone or idle, prefills, or was waited for in vain."""
        prefilling = {member.peer for member, _, _ in rank.here.values() if member.is_prefill}
        for name in self.leader.expected:
            if name not in rank.links:
                raise RuleBroken(f"{name!r} is expected and not attached")
            if name in rank.silent:
                raise RuleBroken(f"{name!r} is expected and has no step to come")
            if name in prefilling:
                raise RuleBroken(f"{name!r} is expected in the middle of a prefill")
            if name in rank.missed:
                raise RuleBroken(f"{name!r} is expected again, and has not come since")

    def _check_members(self, rank: Rank) -> None:
        """Whatever a rank waits for depends on nothing but replies of units handed out before."""
        awaited: Awaited = rank.source.awaited  # type: ignore[attr-defined]
        for name, layer_id, micro_batch_id in awaited:
            link = rank.links.get(name)
            if link is None:
                raise RuleBroken(f"rank {rank.number} waits for {name!r}, which is not attached")
            # What died, or lost its link, without the rank's knowledge yet.
            if link.is_lost or link.peer.is_dead:
                continue
            if not link.peer.will_send(rank.number, layer_id, micro_batch_id):
                raise RuleBroken(
                    f"rank {rank.number} waits for layer {layer_id}, micro-batch "
                    f"{micro_batch_id} of {name!r}, which waits for something else"
                )

    def _check_sequences(self) -> None:
        """Every rank ran the leader's units, in order, but for members that were gone."""
        said = dict(self._ranks[0].sequence)
        for rank in self._ranks:
            numbers = [number for number, _ in rank.sequence]
            if numbers != sorted(set(numbers)):
                raise RuleBroken(f"rank {rank.number} ran decode units in the order {numbers}")
            for number, members in rank.sequence:
                if not set(members) <= set(said.get(number, ())):
                    raise RuleBroken(
                        f"unit {number} is {said.get(number)} on rank 0 and {members} on "
                        f"rank {rank.number}"
                    )
