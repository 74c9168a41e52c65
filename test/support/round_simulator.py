"""Event-driven simulation of attention servers and one MLP server, driven by any `UnitSource`.

It draws exactly what the project's first simulation of round policies drew, number for number, so
that throughputs compare: N servers send one exchange per layer and micro-batch, in the order in
which greenlets take turns, to one server that runs one unit at a time. Times are microseconds, but
the source is handed seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from sglang_afd.rounds.units import Intent, Member, Unit, UnitSource

US = 1e-6


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Fitted times of one model on one machine, in microseconds."""

    layers: int
    dense: float  # attention side, per layer and micro-batch, whatever the batch
    core0: float  # attention core per request
    core_k: float  # ... and per 1024 tokens of context
    launch: float  # expert run, fixed
    read: float  # reading all experts of one layer on one unit
    slope: float  # expert run per token per attention GPU, summed over peers
    gpus: int  # in an attention server and in an MLP unit

    def attention_us(self, batch: float, context: float) -> float:
        """One layer of one micro-batch."""
        return self.dense + batch * (self.core0 + self.core_k * context / 1024)

    def experts_us(self, tokens: float, units: float) -> float:
        """One expert run; both models route to 8 of 128 experts, uniformly."""
        touched = 1.0 - (15 / 16) ** (tokens * self.gpus)
        return self.launch + (self.read * touched + self.slope * tokens) / units


GB200 = Hardware(
    layers=94, dense=60.0, core0=0.0, core_k=0.3095, launch=9.0, read=75.0, slope=0.269, gpus=4
)
H200 = Hardware(
    layers=48, dense=58.0, core0=0.18, core_k=0.44, launch=5.0, read=275.0, slope=0.25, gpus=1
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is simulated."""

    hardware: Hardware
    servers: int
    units: float = 1.0  # MLP units
    batch: int  # per attention GPU
    context: float
    micro_batches: int = 2
    prefill: float = 0.0  # probability that a decode step is followed by a prefill chunk
    gap_us: tuple[float, float] = (100.0, 1000.0)  # one mean per server, +-30 % per step
    stall: float = 0.0  # probability per step of one stall inside it
    stall_us: tuple[float, float] = (2e3, 1e4)
    late: float = 0.0  # probability per step that the announced next one starts 20-100 ms late
    steps: int = 40  # length of the run in ideal steps
    seed: int = 1
    announces: bool = True
    jitter: float = 0.05  # of each layer's attention
    # Before the run each server by itself takes so many steps, whose attention and experts need
    # this share of their time; then it is idle until the run begins.
    warm_steps: int = 0
    warm_share: float = 1.0

    @property
    def warm_us(self) -> float:
        """Time for the first steps of one server."""
        hardware, parts = self.hardware, self.micro_batches
        attention = hardware.attention_us(self.batch / parts, self.context)
        experts = hardware.experts_us(self.batch / parts, self.units)
        layers_us = hardware.layers * parts * (attention + experts) * self.warm_share
        return self.warm_steps * 2 * (layers_us + self.gap_us[1])

    @property
    def step_us(self) -> float:
        """Length of an undisturbed step."""
        hardware, parts = self.hardware, self.micro_batches
        experts = hardware.experts_us(self.servers * self.batch / parts, self.units)
        attention = hardware.attention_us(self.batch / parts, self.context)
        return hardware.layers * parts * max(attention, experts)


GB200_7_1 = Scene(hardware=GB200, servers=7, batch=96, context=8192)
H200_6_2 = Scene(hardware=H200, servers=6, units=2, batch=128, context=4096)

TRANSFER_US = (6.0, 10.0)
SPREAD, BATCH_SPREAD = 0.15, 0.05
WARM = 0.25  # share of the run that is not measured


class Server:
    """One attention server: draws its steps and walks through their exchanges."""

    def __init__(self, scene: Scene, number: int) -> None:
        self.scene, self.number = scene, number
        self.rng = np.random.default_rng([scene.seed, number])
        self._context, self._batch = self.rng.normal(size=2)
        self._mean_gap = self.rng.uniform(*scene.gap_us)
        self.is_prefill = self.next_is_prefill = False
        self.step = 0
        self.parts = scene.micro_batches
        self.ended_us: float | None = None
        self.steps: list[tuple[float, float, int]] = []  # (end, duration, tokens)
        self.prefills: list[tuple[float, float]] = []  # (end, duration)

    def begin(self, now: float) -> None:
        """Draw a step; the order of draws is what makes runs comparable."""
        scene, rng, hardware = self.scene, self.rng, self.scene.hardware
        self.is_prefill, self.began, self.free, self.op = self.next_is_prefill, now, now, 0
        self.step += 1
        self._context = 0.98 * self._context + math.sqrt(1 - 0.98**2) * rng.normal()
        self._batch = 0.95 * self._batch + math.sqrt(1 - 0.95**2) * rng.normal()
        chunk = int(rng.integers(512, 2049))
        self.next_is_prefill = bool(rng.uniform() < scene.prefill) and not self.is_prefill
        late = rng.uniform(2e4, 1e5) * (rng.uniform() < scene.late)
        self.gap = self._mean_gap * rng.uniform(0.7, 1.3) + late
        self.tokens = max(1, round(scene.batch * (1 + BATCH_SPREAD * self._batch)))
        parts = self.parts = 1 if self.is_prefill else scene.micro_batches
        if self.is_prefill:
            self.rows = [chunk / hardware.gpus]
            half = hardware.attention_us(scene.batch / 2, scene.context)
            self.attention_us = half * (5 + 15 * (chunk - 512) / 1536)
        else:
            self.rows = [
                self.tokens // parts + (part < self.tokens % parts) for part in range(parts)
            ]
            context = scene.context * math.exp(SPREAD * self._context)
            self.attention_us = hardware.attention_us(self.tokens / parts, context)
        if self.is_warming_up:
            self.attention_us *= scene.warm_share
        noise = 1 + scene.jitter * rng.normal(size=hardware.layers * parts)
        self.noise = np.maximum(0.5, noise).tolist()
        if rng.uniform() < scene.stall:
            where = int(rng.integers(len(self.noise)))
            self.noise[where] += rng.uniform(*scene.stall_us) / self.attention_us
        self.replies: list[float | None] = [now] * parts

    @property
    def is_warming_up(self) -> bool:
        """Whether this step is one of the first."""
        return self.step <= self.scene.warm_steps

    def member(self, layer_id: int, part: int) -> Member:
        """One exchange of the present step."""
        return Member(
            peer=self.number,
            micro_batch_id=part,
            step=self.step,
            layer_id=layer_id,
            num_rows=max(1, round(self.rows[part])),
            num_micro_batches=self.parts,
            is_prefill=self.is_prefill,
        )


class Kind(IntEnum):
    """What happens at a time."""

    REQUEST, DONE, START, WAKE = range(4)


@dataclass
class Result:
    """What one run measured."""

    tokens_per_s_per_gpu: float = 0.0
    peers_per_unit: float = 0.0
    busy: float = 0.0  # share of time in which experts ran
    step_p50_ms: float = 0.0
    step_p99_ms: float = 0.0
    prefill_ms: float = 0.0
    between_p99_ms: float = 0.0


@dataclass
class _Tally:
    busy_us: float = 0.0
    units: int = 0
    peers: int = 0
    ends: list[tuple[float, float]] = field(default_factory=list)


class Simulation:
    """One run of one scene."""

    def __init__(self, scene: Scene, source: UnitSource) -> None:
        self.scene, self.source = scene, source
        self._heap: list[tuple[float, int, Kind, object]] = []
        self._pushed = self._transfer = 0
        rng = np.random.default_rng([scene.seed, 999])
        self._transfers = rng.uniform(*TRANSFER_US, size=4096).tolist()
        self.servers = [Server(scene, number) for number in range(scene.servers)]
        self._running: Unit | None = None
        self._starts: list[float] = []  # of each server's run
        self._tally = _Tally()

    def run(self) -> Result:
        """Simulate to the end and report."""
        scene = self.scene
        begin = scene.warm_us * scene.servers
        length = scene.step_us * scene.steps
        measured, end = begin + length * WARM, begin + length
        draws = np.random.default_rng([scene.seed, 7]).uniform(0, scene.step_us, scene.servers)
        self._starts = [begin + float(draw) for draw in draws]
        for number, start in enumerate(self._starts):
            self.source.peer_attached(number, number + 1, 0.0)
            first = number * scene.warm_us if scene.warm_steps else start
            self._push(first, Kind.START, number)
        while self._heap and self._heap[0][0] <= end:
            now, _, kind, what = heapq.heappop(self._heap)
            self._happens(now, kind, what)
            if self._running is None:
                self._go(now, is_measured=now >= measured)
        return self._report(measured, end)

    def _push(self, at: float, kind: Kind, what: object = None) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, kind, what))

    def _transfer_us(self) -> float:
        self._transfer = (self._transfer + 1) & 4095
        return self._transfers[self._transfer]

    def _happens(self, now: float, kind: Kind, what: object) -> None:
        match kind, what:
            case Kind.REQUEST, Member():
                self.source.arrived(what, now * US)
            case Kind.DONE, _:
                self._done(now)
            case Kind.START, int():
                server = self.servers[what]
                server.begin(now)
                self._announce(server, now)
                self._advance(server)

    def _announce(self, server: Server, now: float) -> None:
        if self.scene.announces:
            intent = Intent(
                peer=server.number,
                step=server.step + 1,
                num_rows=1,
                is_prefill=server.next_is_prefill,
            )
            self.source.announced(intent, now * US)

    def _done(self, now: float) -> None:
        unit, self._running = self._running, None
        assert unit is not None, "nothing was running"
        self.source.finished(unit, now * US)
        if not unit.is_last_piece:
            return
        for member in unit.members:
            server = self.servers[member.peer]  # type: ignore[call-overload]
            server.replies[member.micro_batch_id] = now + self._transfer_us()
            self._advance(server)

    def _advance(self, server: Server) -> None:
        parts = server.parts
        while server.op < self.scene.hardware.layers * parts:
            layer_id, part = divmod(server.op, parts)
            if (reply := server.replies[part]) is None:
                return
            noise = server.noise[server.op]
            server.free = max(server.free, reply) + server.attention_us * noise
            server.replies[part] = None
            at = server.free + self._transfer_us()
            self._push(at, Kind.REQUEST, server.member(layer_id, part))
            server.op += 1
        replies = [reply for reply in server.replies if reply is not None]
        if len(replies) == parts:
            self._end_step(server, max(replies))

    def _end_step(self, server: Server, end: float) -> None:
        if server.is_prefill:
            server.prefills.append((end, end - server.began))
        else:
            server.steps.append((end, end - server.began, server.tokens))
        if server.step == self.scene.warm_steps:
            self.source.withdrawn(server.number, end * US)
            self._push(self._starts[server.number], Kind.START, server.number)
        else:
            self._push(end + server.gap, Kind.START, server.number)

    def _go(self, now: float, *, is_measured: bool) -> None:
        unit = self.source.next_unit(now * US)
        if unit is None:
            wake = self.source.wake_at_s(now * US)
            if wake is not None:
                # Never at the same instant again: the heap must move on.
                self._push(max(wake / US, now + 1e-3), Kind.WAKE)
            return
        self._running = unit
        took = self.scene.hardware.experts_us(self._rows(unit), self.scene.units)
        if all(self.servers[member.peer].is_warming_up for member in unit.members):  # type: ignore[call-overload]
            took *= self.scene.warm_share
        self._push(now + took, Kind.DONE)
        if is_measured:
            self._tally.busy_us += took
            if not unit.is_prefill:
                self._tally.units += 1
                self._tally.peers += len({member.peer for member in unit.members})

    def _rows(self, unit: Unit) -> float:
        if unit.is_prefill:
            return unit.num_rows
        return sum(member.num_rows for member in unit.members)

    def _report(self, begin: float, end: float) -> Result:
        """Rates are taken between a server's first and last measured step ends."""
        tokens, durations, between = 0.0, [], []
        for server in self.servers:
            kept = [step for step in server.steps if begin <= step[0] <= end]
            # The first step of a server ends no interval.
            kept = kept[1:] if kept and kept[0] is server.steps[0] else kept
            durations += [step[1] for step in kept]
            between += [b[0] - a[0] for a, b in zip(kept, kept[1:], strict=False)]
            if len(kept) > 1:
                tokens += sum(step[2] for step in kept[1:]) / (kept[-1][0] - kept[0][0]) * 1e6
        prefills = [
            took for server in self.servers for at, took in server.prefills if begin <= at <= end
        ]
        gpus = self.scene.servers + self.scene.units
        return Result(
            tokens_per_s_per_gpu=tokens / gpus,
            peers_per_unit=self._tally.peers / max(1, self._tally.units),
            busy=self._tally.busy_us / (end - begin),
            step_p50_ms=_percentile_ms(durations, 50),
            step_p99_ms=_percentile_ms(durations, 99),
            prefill_ms=float(np.mean(prefills)) / 1e3 if prefills else 0.0,
            between_p99_ms=_percentile_ms(between, 99),
        )


def _percentile_ms(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values or [0.0], percent)) / 1e3


def simulate(scene: Scene, make_source: Callable[[Sequence[int]], UnitSource]) -> Result:
    """Run `scene` with the source that `make_source` builds from the layer ids."""
    return Simulation(scene, make_source(range(scene.hardware.layers))).run()
