"""Scripted attention servers and MLP ranks, and a clock: a small world that shows what a rule does.

The sources are those that the MLP ranks use. A peer walks through the layers as greenlets do:
attention and send of each micro-batch in turn, each as soon as its last reply is there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from round_pictures.recording import Bar, Mark, Recording, Run, Wait
from sglang_afd.rounds.follower import FollowerQueue
from sglang_afd.rounds.orders import order_of
from sglang_afd.rounds.rounds import Rounds
from sglang_afd.rounds.units import Intent, Member, Unit, UnitSource

TRANSFER_MS = 0.1


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of an attention server."""

    gap_ms: float = 1.0  # host time before it
    attention_ms: float = 1.0  # of one layer of one micro-batch
    parts: int = 1  # micro-batches
    rows: int = 8  # of each micro-batch
    is_prefill: bool = False
    hangs_ms: Mapping[int, float] = field(default_factory=dict)  # by layer, on top


@dataclass(frozen=True, kw_only=True)
class Script:
    """What one attention server does."""

    steps: Sequence[Step]
    says_idle: bool = True  # withdraws when its last step has ended
    dies_ms: float = float("inf")
    noticed_after_ms: float = 0.0  # by the MLP ranks
    delays_ms: Mapping[int, float] = field(default_factory=dict)  # by rank, of its first rows


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is played."""

    scripts: Mapping[str, Script]
    layers: int
    make_sources: Callable[[Sequence[int]], Sequence[UnitSource]]  # one for each rank
    expert_ms: Callable[[Unit], float]
    until_ms: float


def play(scene: Scene) -> Recording:
    """Play `scene` to its end."""
    return _Stage(scene).play()


class _Stage:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.recording = Recording()
        self.now_ms = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_pushed = 0
        sources = scene.make_sources(range(scene.layers))
        self.ranks = [_Rank(self, number, source) for number, source in enumerate(sources)]
        self.epochs = {name: number for number, name in enumerate(scene.scripts, start=1)}
        self.servers = {name: _Server(self, name, script) for name, script in scene.scripts.items()}

    @property
    def now_s(self) -> float:
        return 1.0 + self.now_ms / 1e3

    def at(self, at_ms: float, what: Callable[[], None]) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (at_ms, self._num_pushed, what))

    def play(self) -> Recording:
        for rank in self.ranks:
            for name, epoch in self.epochs.items():
                rank.source.peer_attached(name, epoch, self.now_s)
        for server in self.servers.values():
            server.enters()
        while self._heap and self._heap[0][0] <= self.scene.until_ms:
            self.now_ms, _, what = heapq.heappop(self._heap)
            what()
        self.now_ms = self.scene.until_ms
        for rank in self.ranks:
            rank.rests_as("")
        for server in self.servers.values():
            server.curtain()
        return self.recording


class _Rank:
    """One MLP rank: hears, asks its source, runs one unit at a time."""

    def __init__(self, stage: _Stage, number: int, source: UnitSource) -> None:
        self.stage, self.number, self.source = stage, number, source
        self.lane = f"MLP rank {number}"
        self.held: set[Member] = set()
        self.served: set[tuple[object, int, int, int]] = set()  # peer, step, layer, micro-batch
        self._running: Unit | None = None
        self._rest = ("", 0.0)  # why it does not run, and since when

    def hears(self, tell: Callable[[UnitSource, float], None]) -> None:
        tell(self.source, self.stage.now_s)
        self._turn()

    def gets(self, member: Member) -> None:
        self.held.add(member)
        self.hears(lambda source, now_s: source.arrived(member, now_s))

    def _turn(self) -> None:
        if self._running is not None:
            return
        stage = self.stage
        unit = self.source.next_unit(stage.now_s)
        if unit is None:
            self._waits()
            wake_s = self.source.wake_at_s(stage.now_s)
            if wake_s is not None:
                stage.at(max((wake_s - 1.0) * 1e3, stage.now_ms) + 1e-3, self._turn)
            return
        self.rests_as("")
        if self.number == 0 and len(stage.ranks) > 1 and not unit.is_prefill:
            self._tells_others(unit)
        self._running = unit
        begin_ms = stage.now_ms
        end_ms = begin_ms + stage.scene.expert_ms(unit)
        run = Run(rank=self.number, unit=unit, begin_ms=begin_ms, end_ms=end_ms)
        stage.recording.runs.append(run)
        stage.at(end_ms, lambda: self._ends(unit))

    def _tells_others(self, unit: Unit) -> None:
        order = order_of(unit, self.stage.epochs)
        for rank in self.stage.ranks[1:]:
            if isinstance(follower := rank.source, FollowerQueue):
                at_ms = self.stage.now_ms + TRANSFER_MS

                def tell(queue: FollowerQueue = follower, rank: _Rank = rank) -> None:
                    rank.hears(lambda _, __: queue.ordered(order))

                self.stage.at(at_ms, tell)

    def _ends(self, unit: Unit) -> None:
        self._running = None
        self.source.finished(unit, self.stage.now_s)
        if unit.is_last_piece:
            for member in unit.members:
                self.held.discard(member)
                place = (member.step, member.layer_id, member.micro_batch_id)
                self.served.add((member.peer, *place))
                server = self.stage.servers[str(member.peer)]
                self.stage.at(
                    self.stage.now_ms + TRANSFER_MS,
                    lambda server=server, member=member: server.hears(self.number, member),
                )
        self._turn()

    def _waits(self) -> None:
        awaited = self.source.awaited if isinstance(self.source, Rounds | FollowerQueue) else []
        if awaited:
            self._note_awaited(awaited)
            self.rests_as("member wait")
        elif self.held:
            is_follower = isinstance(self.source, FollowerQueue)
            self.rests_as("order wait" if is_follower else "window")
        else:
            self.rests_as("")

    def rests_as(self, why: str) -> None:
        before, since_ms = self._rest
        now_ms = self.stage.now_ms
        if before == why:
            return
        if before and now_ms > since_ms:
            bar = Bar(lane=self.lane, kind=before, begin_ms=since_ms, end_ms=now_ms)
            self.stage.recording.bars.append(bar)
        self._rest = (why, now_ms)

    def _note_awaited(self, awaited: list[tuple[object, int, int]]) -> None:
        for peer, layer_id, part in awaited:
            server = self.stage.servers[str(peer)]
            step = server.number + server.is_prefilling  # decode rows are of a later step
            before = [(peer, step, layer_id - 1, other) for other in range(part + 1)]
            is_sent = (step, layer_id, part) in server.sent
            is_free = part > 0 if layer_id == 0 else all(one in self.served for one in before)
            wait = Wait(
                peer=str(peer),
                layer_id=layer_id,
                micro_batch_id=part,
                step=step,
                begin_ms=self.stage.now_ms,
                is_sound=is_sent or is_free,
            )
            self.stage.recording.waits.append(wait)


class _Server:
    """One attention server, which follows its script."""

    def __init__(self, stage: _Stage, name: str, script: Script) -> None:
        self.stage, self.name, self.script = stage, name, script
        self.number = 0  # of the step, from 1
        self._op = 0
        self._free_ms = self._begun_ms = 0.0
        self._replies: list[float | None] = []  # by micro-batch, when the last one came
        self.sent: set[tuple[int, int, int]] = set()  # step, layer, micro-batch
        self._answers: dict[Member, set[int]] = {}  # ranks that have replied
        self._is_in_step = self._is_dead = False

    def enters(self) -> None:
        stage, script = self.stage, self.script
        stage.at(script.steps[0].gap_ms, self._begins)
        if script.dies_ms < stage.scene.until_ms:
            stage.at(script.dies_ms, self._dies)

    @property
    def is_prefilling(self) -> bool:
        return self._is_in_step and self._step.is_prefill

    @property
    def _step(self) -> Step:
        return self.script.steps[self.number - 1]

    def _begins(self) -> None:
        if self._is_dead:
            return
        self.number += 1
        self._is_in_step, self._op = True, 0
        self._begun_ms = self._free_ms = self.stage.now_ms
        self._replies = [self.stage.now_ms] * self._step.parts
        self._goes_on()

    def _announces(self) -> None:
        """The step after the present one."""
        coming = self.script.steps[self.number]
        intent = Intent(
            peer=self.name,
            step=self.number + 1,
            num_rows=coming.rows * coming.parts,
            num_micro_batches=coming.parts,
            is_prefill=coming.is_prefill,
        )
        self._marks("prefill intent" if coming.is_prefill else "intent")
        leader = self.stage.ranks[0]
        at_ms = self.stage.now_ms + TRANSFER_MS
        self.stage.at(
            at_ms, lambda: leader.hears(lambda source, now_s: source.announced(intent, now_s))
        )

    def _goes_on(self) -> None:
        step, stage = self._step, self.stage
        while self._op < stage.scene.layers * step.parts:
            layer_id, part = divmod(self._op, step.parts)
            reply_ms = self._replies[part]
            if reply_ms is None:
                return
            begin_ms = max(self._free_ms, reply_ms)
            if hang_ms := step.hangs_ms.get(layer_id, 0.0):
                self._bar("hang", begin_ms, begin_ms + hang_ms)
            end_ms = begin_ms + hang_ms + step.attention_ms
            kind = "prefill attention" if step.is_prefill else "attention"
            label = f"{layer_id}" if step.parts == 1 else f"{layer_id}{'ABCD'[part]}"
            self._bar(kind, begin_ms + hang_ms, end_ms, label)
            self._replies[part] = None
            self._free_ms = end_ms
            stage.at(end_ms, lambda layer_id=layer_id, part=part: self._sends(layer_id, part))
            self._op += 1
        if None not in self._replies:
            self._ends()

    def _sends(self, layer_id: int, part: int) -> None:
        if self._is_dead:
            return
        step = self._step
        member = Member(
            peer=self.name,
            micro_batch_id=part,
            step=self.number,
            layer_id=layer_id,
            num_rows=step.rows,
            num_micro_batches=step.parts,
            is_prefill=step.is_prefill,
        )
        self._answers[member] = set()
        self.sent.add((self.number, layer_id, part))
        is_first = (self.number, layer_id, part) == (1, 0, 0)
        for rank in self.stage.ranks:
            delay_ms = self.script.delays_ms.get(rank.number, 0.0) if is_first else 0.0
            at_ms = self.stage.now_ms + TRANSFER_MS + delay_ms
            self.stage.at(at_ms, lambda rank=rank: None if self._is_dead else rank.gets(member))
        if (layer_id, part) == (0, 0) and self.number < len(self.script.steps):
            self._announces()

    def hears(self, rank: int, member: Member) -> None:
        if self._is_dead:
            return
        self._answers[member].add(rank)
        if len(self._answers[member]) == len(self.stage.ranks):
            self._replies[member.micro_batch_id] = self.stage.now_ms
            self._goes_on()

    def _ends(self) -> None:
        now_ms = self.stage.now_ms
        self._bar("step", self._begun_ms, now_ms)
        self._is_in_step = False
        self.stage.recording.steps_ended.setdefault(self.name, []).append(now_ms)
        if self.number < len(self.script.steps):
            self.stage.at(now_ms + self.script.steps[self.number].gap_ms, self._begins)
        elif self.script.says_idle:
            self._marks("withdrawal")
            leader = self.stage.ranks[0]
            self.stage.at(
                now_ms + TRANSFER_MS,
                lambda: leader.hears(lambda source, now_s: source.withdrawn(self.name, now_s)),
            )

    def _dies(self) -> None:
        self._is_dead = True
        self._marks("death")
        for rank in self.stage.ranks:
            at_ms = self.stage.now_ms + self.script.noticed_after_ms
            self.stage.at(at_ms, lambda rank=rank: self._is_forgotten(rank))

    def _is_forgotten(self, rank: _Rank) -> None:
        rank.held = {member for member in rank.held if member.peer != self.name}
        rank.hears(lambda source, now_s: source.peer_gone(self.name, now_s))

    def curtain(self) -> None:
        """The run has ended, perhaps in the middle of a step; the dead did nothing after death."""
        end_ms = min(self.stage.now_ms, self.script.dies_ms)
        if self._is_in_step:
            self._bar("step", self._begun_ms, end_ms)
        self.stage.recording.bars = [
            replace(bar, end_ms=min(bar.end_ms, end_ms)) if bar.lane == self.name else bar
            for bar in self.stage.recording.bars
            if bar.lane != self.name or bar.begin_ms < end_ms
        ]

    def _bar(self, kind: str, begin_ms: float, end_ms: float, label: str = "") -> None:
        bar = Bar(lane=self.name, kind=kind, begin_ms=begin_ms, end_ms=end_ms, label=label)
        self.stage.recording.bars.append(bar)

    def _marks(self, kind: str) -> None:
        mark = Mark(lane=self.name, kind=kind, at_ms=self.stage.now_ms)
        self.stage.recording.marks.append(mark)
