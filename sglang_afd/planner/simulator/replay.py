"""replay: plays a recorded timeline again, and says how far its step times are off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from sglang_afd.planner.simulator.group import Group, GroupOptions
from sglang_afd.planner.simulator.plan import StepPlan
from sglang_afd.planner.simulator.recording import Op, RecordedStep, Recording, Run
from sglang_afd.planner.simulator.server import Server
from sglang_afd.rounds.units import Unit

# A longer pause between two steps is one without requests, of which the server told rank 0.
IDLE_US = 100_000.0

OpsOf = Callable[[RecordedStep], list[Op]]


@dataclass(frozen=True, kw_only=True)
class StepError:
    """One step: recorded, played, and the signed difference."""

    server: str
    number: int
    is_prefill: bool
    recorded_us: float
    played_us: float

    @property
    def percent(self) -> float:
        """Above 0 the played step is longer."""
        return 100 * (self.played_us / self.recorded_us - 1)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """All steps of all servers."""

    steps: tuple[StepError, ...]
    recorded_peers_per_run: float  # decode, rank 0
    played_peers_per_run: float
    recorded_us: float  # from the first begin to the last end
    played_us: float

    def of_decode(self) -> list[StepError]:
        """Without prefill."""
        return [step for step in self.steps if not step.is_prefill]

    @property
    def median_abs_percent(self) -> float:
        """Of single decode steps."""
        return median(abs(step.percent) for step in self.of_decode())

    @property
    def p90_abs_percent(self) -> float:
        """Of single decode steps."""
        return float(np.percentile([abs(step.percent) for step in self.of_decode()], 90))

    @property
    def mean_percent(self) -> float:
        """Of the mean decode step."""
        decode = self.of_decode()
        played_us = fmean(step.played_us for step in decode)
        return 100 * (played_us / fmean(step.recorded_us for step in decode) - 1)


def replay(recording: Recording, *, as_recorded: bool = True) -> Replayed:
    """Let the simulator order what was recorded.

    Args:
        recording: Durations of attention, ways and runs; when a run began and who was in it is not
            taken from it.
        as_recorded: Every duration as it was, by step, layer and micro-batch. False: means, as a
            profile has them; then only their sums can agree.
    """
    ids = sorted(recording.steps)
    starts_us = [recording.steps[server_id][0].began_us for server_id in ids]
    first_us = min(starts_us)
    ops_of = _own_ops if as_recorded else _mean_ops(recording)
    servers = [
        Server(
            number=number,
            num_layers=len(recording.layers),
            costs=_RecordedServer(recording, recording.steps[server_id], ops_of, first_us),
            warm_steps=0,
        )
        for number, server_id in enumerate(ids)
    ]
    num_steps = max(len(steps) for steps in recording.steps.values()) + 1
    group = Group(
        costs=_RecordedRanks(recording, ids, as_recorded=as_recorded),
        servers=servers,
        options=GroupOptions(num_ranks=recording.num_ranks, num_steps=num_steps, is_literal=True),
    )
    group.play([start_us - first_us for start_us in starts_us])
    errors = tuple(
        StepError(
            server=server_id,
            number=step.number,
            is_prefill=step.is_prefill,
            recorded_us=step.ended_us - step.began_us,
            played_us=played.ended_us + step.head_us - played.began_us,
        )
        for server, server_id in zip(servers, ids, strict=True)
        for step, played in zip(recording.steps[server_id], server.steps, strict=True)
    )
    decode = [run for run in recording.runs if not run.is_prefill and run.rank == 0]
    return Replayed(
        steps=errors,
        recorded_peers_per_run=sum(len(run.members) for run in decode) / max(1, len(decode)),
        played_peers_per_run=group.num_unit_peers / max(1, group.num_units),
        recorded_us=max(steps[-1].ended_us for steps in recording.steps.values()) - first_us,
        played_us=group.now_us,
    )


class _RecordedServer:
    def __init__(
        self, recording: Recording, steps: Sequence[RecordedStep], ops_of: OpsOf, first_us: float
    ) -> None:
        self._recording, self._steps, self._ops_of = recording, steps, ops_of
        self._first_us = first_us
        self._next = 0

    def next_step(self) -> StepPlan | None:
        """See `ServerCosts`."""
        if self._next == len(self._steps):
            return None
        step = self._steps[self._next]
        self._next += 1
        after = self._steps[self._next] if self._next < len(self._steps) else None
        gap_us = after.began_us - step.ended_us if after else 0.0
        is_idle = gap_us > IDLE_US
        ops, ranks = self._ops_of(step), range(self._recording.num_ranks)
        first_layer = self._recording.layers[0]
        return StepPlan(
            is_prefill=step.is_prefill,
            rows=[step.ops[first_layer, part].rows for part in range(step.num_micro_batches)],
            tokens=0.0,
            attn_us=[ops[0].attn_us + step.stall_us, *(op.attn_us for op in ops[1:])],
            out_us=[[op.out_us[rank] for rank in ranks] for op in ops],
            back_us=[[op.back_us[rank] for rank in ranks] for op in ops],
            send_us=[op.send_us for op in ops],
            combine_us=[op.combine_us for op in ops],
            outside_us=step.head_us + (0.0 if is_idle else gap_us),
            next_is_prefill=after.is_prefill if after else False,
            next_from_us=after.began_us - self._first_us if after and is_idle else 0.0,
            goes_idle=after is None or is_idle,
        )


def _in_order(step: RecordedStep) -> list[tuple[int, int]]:
    return sorted(step.ops)


def _own_ops(step: RecordedStep) -> list[Op]:
    return [step.ops[where] for where in _in_order(step)]


def _mean_ops(recording: Recording) -> OpsOf:
    """Means over all steps, of exchanges of the same kind, layer, micro-batch and rows."""
    samples: defaultdict[tuple[bool, int, int, int], list[Op]] = defaultdict(list)
    for steps in recording.steps.values():
        for step in steps:
            for (layer, part), op in step.ops.items():
                samples[step.is_prefill, layer, part, op.rows].append(op)
    ranks = range(recording.num_ranks)
    means = {
        key: Op(
            rows=key[-1],
            attn_us=fmean(op.attn_us for op in ops),
            send_us=fmean(op.send_us for op in ops),
            combine_us=fmean(op.combine_us for op in ops),
            out_us={rank: fmean(op.out_us[rank] for op in ops) for rank in ranks},
            back_us={rank: fmean(op.back_us[rank] for op in ops) for rank in ranks},
        )
        for key, ops in samples.items()
    }

    def ops_of(step: RecordedStep) -> list[Op]:
        return [
            means[step.is_prefill, layer, part, step.ops[layer, part].rows]
            for layer, part in _in_order(step)
        ]

    return ops_of


class _RecordedRanks:
    """A run that was recorded takes what it took; others what their rows take in the mean."""

    def __init__(self, recording: Recording, ids: Sequence[str], *, as_recorded: bool) -> None:
        turns = recording.turns
        self._turns_us = turns.before_us + turns.after_us
        self._layers = recording.layers
        self._numbers = {
            (peer, step.number): (number, ordinal)
            for number, peer in enumerate(ids)
            for ordinal, step in enumerate(recording.steps[peer], 1)
        }
        self._fits = {
            (rank, is_prefill): _fit(
                [run for run in recording.runs if (run.rank, run.is_prefill) == (rank, is_prefill)]
            )
            for rank in range(recording.num_ranks)
            for is_prefill in (False, True)
        }
        self._known = {self._key(run): run.run_us for run in recording.runs if as_recorded}

    def unit_us(self, rank: int, unit: Unit) -> float:
        """See `RankCosts`."""
        members = tuple(sorted((member.peer, member.step) for member in unit.members))
        where = (rank, self._layers[unit.layer_id], unit.micro_batch_id)
        known_us = self._known.get((*where, unit.num_rows, members))  # type: ignore[arg-type]
        if known_us is None:
            fixed_us, row_us = self._fits[rank, unit.is_prefill]
            known_us = fixed_us + row_us * unit.num_rows
        return known_us + self._turns_us

    def _key(self, run: Run) -> tuple[int, int, int, int, tuple[tuple[int, int], ...]]:
        members = (self._numbers.get(member, (-1, -1)) for member in run.members)
        return run.rank, run.layer, run.micro_batch, run.rows, tuple(sorted(members))


def _fit(runs: Sequence[Run]) -> tuple[float, float]:
    """Fixed part and time per row; neither is below 0."""
    if not runs:
        return 0.0, 0.0
    rows = np.array([run.rows for run in runs], dtype=np.float64)
    took_us = np.array([run.run_us for run in runs])
    if np.ptp(rows) == 0:
        return float(took_us.mean()), 0.0
    row_us, fixed_us = np.polyfit(rows, took_us, 1)
    if row_us < 0 or fixed_us < 0:
        return float(took_us.mean()), 0.0
    return float(fixed_us), float(row_us)
