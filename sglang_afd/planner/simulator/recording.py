"""What a recorded timeline of real servers says of each exchange and each run."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from statistics import fmean, median

from sglang_afd.errors import ConfigError
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.trace import clocks, exchanges
from sglang_afd.trace.attn import MICRO_BATCH_0
from sglang_afd.trace.exchanges import Dispatched, Served
from sglang_afd.trace.reading import Event, Timeline

# A rank that has rows and is free for so long waits for other rows.
PARKED_US = RoundOptions().min_park_s * 1e6


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
    stall_us: float = 0.0  # MLP servers were away
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
class Turns:
    """What the loop of a rank does around a run."""

    before_us: float  # from the last arrival to the run
    after_us: float  # from the replies to when it would look at arrivals


@dataclass(frozen=True, slots=True)
class Recording:
    """Of one group."""

    layers: tuple[int, ...]  # that have experts
    steps: dict[str, list[RecordedStep]]  # by attention server
    runs: tuple[Run, ...]
    num_ranks: int
    turns: Turns


def read_recording(timelines: Sequence[Timeline], skip_steps: int = 0) -> Recording:
    """Join the files of the servers of one group.

    Args:
        timelines: Of all attention servers and all MLP ranks.
        skip_steps: The first steps of each server, which are no part of what is to be played, as
            those that warm up.
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
    layers = tuple(sorted({run.layer for run in runs}))
    watched = _add_ways(steps, pairs, shifts_us, runs)
    turns = _turns(runs, watched, layers[0])
    for step in (step for each in steps.values() for step in each):
        for op in step.ops.values():
            op.back_us = {rank: max(us - turns.after_us, 0.0) for rank, us in op.back_us.items()}
    ranks = _ranks(runs, pairs)
    whole = {server: _whole(each[skip_steps:], layers, ranks) for server, each in steps.items()}
    kept = {(server, step.number) for server, each in whole.items() for step in each}
    runs = tuple(run for run in runs if kept.intersection(run.members))
    if all(step.is_prefill for each in whole.values() for step in each):
        raise ConfigError(
            f"the timelines have no decode step with all of its exchanges, after the first "
            f"{skip_steps}; record longer, or skip fewer with --skip-steps"
        )
    return Recording(
        layers=layers,
        steps={server: each for server, each in whole.items() if each},
        runs=runs,
        num_ranks=len(ranks),
        turns=turns,
    )


def _ranks(runs: Sequence[Run], pairs: Sequence[tuple[Dispatched, Served]]) -> Set[int]:
    """Of the group.

    Raises: ConfigError, when one replied whose file is not there.
    """
    there = {run.rank for run in runs}
    for exchange, _ in pairs:
        if missing := exchange.received_us.keys() - there:
            raise ConfigError(
                f"{exchange.timeline.path} has replies of MLP rank {min(missing)}, of which no "
                "timeline is given; give those of all MLP ranks of the run"
            )
    return there


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
        if step is None:
            continue
        if event.name == "stall":
            step.stall_us += event.dur
        if event.tid >= MICRO_BATCH_0:
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
) -> set[tuple[int, float]]:
    """Fill in how long rows and replies were on their way.

    Returns: Rank and begin of the runs whose rows were seen when they came.
    """
    by_number = {(server, step.number): step for server, each in steps.items() for step in each}
    runs_of: defaultdict[int, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.start_us):
        runs_of[run.rank].append(run)
    watched: set[tuple[int, float]] = set()
    hidden: list[tuple[Op, int]] = []
    seen: defaultdict[int, list[float]] = defaultdict(list)
    ends_us = {(run.rank, run.start_us): run.start_us + run.run_us for run in runs}
    for exchange, service in pairs:
        near, far = exchange.timeline.header, service.timeline.header
        step = by_number.get((near.server_id, exchange.key.step))
        received_us = exchange.received_us.get(far.rank)
        if step is None or received_us is None:
            continue
        near_us, far_us = shifts_us[near.server_id], shifts_us[far.server_id]
        op = step.ops[exchange.key.layer, exchange.key.micro_batch]
        sent_us, arrived_us = exchange.dispatch.ts + near_us, service.arrived_us + far_us
        op.out_us[far.rank] = arrived_us - sent_us
        if _is_busy(runs_of[far.rank], sent_us, arrived_us):
            hidden.append((op, far.rank))
        else:
            seen[far.rank].append(arrived_us - sent_us)
            watched.add((far.rank, service.runs[0].ts + far_us))
        ended_us = ends_us[far.rank, service.runs[-1].ts + far_us]
        op.back_us[far.rank] = max(received_us + near_us - ended_us, 0.0)
    for op, rank in hidden:
        if seen[rank]:
            op.out_us[rank] = min(op.out_us[rank], median(seen[rank]))
    return watched


def _is_busy(runs: Sequence[Run], sent_us: float, arrived_us: float) -> bool:
    """Whether the rank ran something while rows came, and so saw them late."""
    before = bisect_right(runs, arrived_us, key=lambda run: run.start_us) - 1
    return before >= 0 and runs[before].start_us + runs[before].run_us > sent_us


def _whole(
    steps: Sequence[RecordedStep], layers: Sequence[int], ranks: Set[int]
) -> list[RecordedStep]:
    """Steps whose exchanges are all there; one that was cut off at the end is not."""
    return [
        step
        for step in steps
        if step.ops
        and step.ended_us > step.began_us
        and len(step.ops) == len(layers) * len({part for _, part in step.ops})
        and {layer for layer, _ in step.ops} == set(layers)
        and all(
            op.out_us.keys() == ranks and op.back_us.keys() == ranks for op in step.ops.values()
        )
    ]


def _turns(runs: Sequence[Run], watched: Set[tuple[int, float]], first_layer: int) -> Turns:
    """Of decode runs; a round that is held back, at the first layer or for rows, is no turn."""
    by_rank: defaultdict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_rank[run.rank].append(run)
    from_rows: list[float] = []
    from_run: list[float] = []
    for of_rank in by_rank.values():
        of_rank.sort(key=lambda run: run.start_us)
        for before, run in zip(of_rank, of_rank[1:], strict=False):
            if run.is_prefill or run.layer == first_layer or run.last_arrived_us is None:
                continue
            is_watched = (run.rank, run.start_us) in watched
            free_us = run.last_arrived_us if is_watched else before.start_us + before.run_us
            waited_us = run.start_us - free_us
            if waited_us >= PARKED_US:
                continue
            (from_rows if is_watched else from_run).append(waited_us)
    before_us = max(fmean(from_rows), 0.0) if from_rows else 0.0
    between_us = max(fmean(from_run), 0.0) if from_run else 0.0
    return Turns(before_us, max(between_us - before_us, 0.0))
