"""What a recorded timeline of real servers says of each exchange and each run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from sglang_afd.errors import ConfigError
from sglang_afd.trace import clocks, exchanges
from sglang_afd.trace.attn import MICRO_BATCH_0
from sglang_afd.trace.exchanges import Dispatched, Served
from sglang_afd.trace.reading import Event, Timeline


@dataclass(slots=True)
class Op:
    """One exchange of one attention server; times in microseconds."""

    rows: int = 0
    attn_us: float = 0.0
    send_us: float = 0.0
    combine_us: float = 0.0
    out_us: dict[int, float] = field(default_factory=dict)  # by rank: rows handed over to arrived
    back_us: dict[int, float] = field(default_factory=dict)  # by rank: end of the run to received


@dataclass(slots=True)
class RecordedStep:
    """Of one attention server, on the clock of all servers."""

    number: int
    is_prefill: bool
    began_us: float
    ended_us: float
    combined_us: float = 0.0  # when its last result was there
    ops: dict[tuple[int, int], Op] = field(default_factory=dict)  # by layer and micro-batch

    @property
    def head_us(self) -> float:
        """Final norm, LM head, sampling."""
        return self.ended_us - self.combined_us

    @property
    def num_micro_batches(self) -> int:
        """At least one."""
        return max(part for _, part in self.ops) + 1


@dataclass(frozen=True, slots=True)
class Run:
    """Of one rank."""

    rank: int
    is_prefill: bool
    layer: int
    micro_batch: int
    rows: int
    start_us: float
    run_us: float  # with handing over the replies
    members: tuple[tuple[str, int], ...]  # server id and step, sorted
    last_arrived_us: float | None


@dataclass(frozen=True, slots=True)
class Recording:
    """Of one group."""

    layers: tuple[int, ...]  # that have experts
    steps: dict[str, list[RecordedStep]]  # by attention server
    runs: tuple[Run, ...]
    num_ranks: int
    turn_us: float  # of the loop, from an arrival to the begin of the run that it lets go


def read_recording(timelines: Sequence[Timeline]) -> Recording:
    """Join the files of the servers of one group.

    Raises: ConfigError, when files are missing or do not belong together.
    """
    pairs = list(exchanges.pairs(list(timelines)))
    roles = {timeline.header.role for timeline in timelines}
    if roles != {"attn", "mlp"} or not pairs:
        raise ConfigError(
            "the timelines share no exchange; give those of all attention servers and all MLP "
            "ranks of one run (--afd-trace DIRECTORY)"
        )
    known = clocks.offsets(list(timelines), pairs)
    shifts_us = {
        timeline.header.server_id: (
            timeline.header.clock_ns - known[timeline.header.boot_id].offset_ns
        )
        / 1000
        for timeline in timelines
    }
    steps = {
        timeline.header.server_id: _steps(timeline, shifts_us[timeline.header.server_id])
        for timeline in timelines
        if timeline.header.role == "attn"
    }
    runs = tuple(
        run
        for timeline in timelines
        if timeline.header.role == "mlp"
        for run in _runs(timeline, shifts_us[timeline.header.server_id])
    )
    _add_ways(steps, pairs, shifts_us, runs)
    layers = tuple(sorted({run.layer for run in runs}))
    whole = {server: _whole(each, layers) for server, each in steps.items()}
    if not any(whole.values()):
        raise ConfigError("the timelines have no step with all of its exchanges")
    ranks = {run.rank for run in runs}
    return Recording(
        layers=layers,
        steps={server: each for server, each in whole.items() if each},
        runs=runs,
        num_ranks=len(ranks),
        turn_us=_turn_us(runs, layers[0]),
    )


def _steps(timeline: Timeline, shift_us: float) -> list[RecordedStep]:
    steps = {
        event.args["step"]: RecordedStep(
            event.args["step"],
            event.args["kind"] == "prefill",
            event.ts + shift_us,
            event.end + shift_us,
        )
        for event in timeline.events
        if event.name.startswith("step ") and event.ph == "X"
    }
    for event in timeline.events:
        step = steps.get(event.args.get("step", -1))
        if event.tid >= MICRO_BATCH_0 and step is not None:
            _add(step, event)
            if event.name == "combine":
                step.combined_us = max(step.combined_us, event.end + shift_us)
    return [steps[number] for number in sorted(steps)]


def _add(step: RecordedStep, event: Event) -> None:
    op = step.ops.setdefault((event.args["layer"], event.tid - MICRO_BATCH_0), Op())
    if event.name == "attention":
        op.attn_us += event.dur
    elif event.name == "dispatch":
        op.send_us += event.dur
        op.rows += event.args["rows"]
    elif event.name == "combine":
        op.combine_us += event.dur


def _runs(timeline: Timeline, shift_us: float) -> list[Run]:
    runs = []
    events = timeline.events
    for event, after in zip(events, [*events[1:], None], strict=True):
        if event.name != "run":
            continue
        reply_us = after.dur if after is not None and after.name == "reply" else 0.0
        args = event.args
        arrivals = [member["arrived_us"] for member in args["members"]]
        known = [at for at in arrivals if at is not None]
        runs.append(
            Run(
                rank=timeline.header.rank,
                is_prefill=args["kind"] == "prefill",
                layer=args["layer"],
                micro_batch=args["micro_batch"],
                rows=args["rows"],
                start_us=event.ts + shift_us,
                run_us=event.dur + reply_us,
                members=tuple(sorted((each["peer"], each["step"]) for each in args["members"])),
                last_arrived_us=max(known) + shift_us if known else None,
            )
        )
    return runs


def _add_ways(
    steps: dict[str, list[RecordedStep]],
    pairs: Sequence[tuple[Dispatched, Served]],
    shifts_us: dict[str, float],
    runs: Sequence[Run],
) -> None:
    by_number = {(server, step.number): step for server, each in steps.items() for step in each}
    ends_us = {(run.rank, run.start_us): run.start_us + run.run_us for run in runs}
    for exchange, service in pairs:
        near, far = exchange.timeline.header, service.timeline.header
        step = by_number.get((near.server_id, exchange.key.step))
        received_us = exchange.received_us.get(far.rank)
        if step is None or received_us is None:
            continue
        near_us, far_us = shifts_us[near.server_id], shifts_us[far.server_id]
        op = step.ops[exchange.key.layer, exchange.key.micro_batch]
        op.out_us[far.rank] = service.arrived_us + far_us - exchange.dispatch.ts - near_us
        ended_us = ends_us[far.rank, service.runs[-1].ts + far_us]
        op.back_us[far.rank] = max(received_us + near_us - ended_us, 0.0)


def _whole(steps: Sequence[RecordedStep], layers: Sequence[int]) -> list[RecordedStep]:
    """Steps whose exchanges are all there; one that was cut off at the end is not."""
    kept = []
    for step in steps:
        if step.ops and all(
            (op := step.ops.get((layer, part))) is not None and op.out_us and op.back_us
            for layer in layers
            for part in range(step.num_micro_batches)
        ):
            kept.append(step)
    return kept


def _turn_us(runs: Sequence[Run], first_layer: int) -> float:
    """From the last arrival, or the end of the run before, to the begin of a decode run."""
    by_rank: defaultdict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_rank[run.rank].append(run)
    turns = []
    for of_rank in by_rank.values():
        of_rank.sort(key=lambda run: run.start_us)
        for before, run in zip(of_rank, of_rank[1:], strict=False):
            if run.is_prefill or run.layer == first_layer or run.last_arrived_us is None:
                continue
            ready_us = max(run.last_arrived_us, before.start_us + before.run_us)
            turns.append(run.start_us - ready_us)
    return max(median(turns), 0.0) if turns else 0.0
