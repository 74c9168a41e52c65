"""What micro-batches and rounds are worth, on real servers with planted delays, without a GPU.

Starts attention and MLP servers of a tiny 8-layer model whose attention part and expert part of
each layer are made to take a given time (they sleep, so that two cores are enough), and measures:

overlap  a step cut into two micro-batches against a whole one; the delays are proportional to the
         rows. Key two_micro_batches_over_one; 0.5625 is ideal with 8 layers.
rounds   four attention servers on one MLP server against four times one, each with an MLP server
         of its own; the expert delay is fixed for each run and four times the attention delay. Keys
         four_peers_efficiency, and four_peers_efficiency_fcfs without rounds, which the delays
         alone would make 0.3125.
warm_up  two attention servers on one MLP server, right after warm-up steps that were far faster,
         then one. Key two_peers_after_warm_up_efficiency, near 0.6 where rounds fall apart. Only
         where it is asked for.
sweep    step times over ratios of both delays and numbers of servers; key sweep, and a plot.

Prints one JSON line. Its `faults` are empty where the counters of both sides and of /metrics agree,
which proves that no delay was skipped; otherwise the exit code is 1.

    python benchmark/bench_overlap.py [--cases overlap rounds sweep] [--plot FILE.png] [--quick]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import provenance
from overlap.counts import Load
from overlap.fleet import Group, Launcher, Server
from overlap.measure import Measurement, measure

NUM_LAYERS = 8
NUM_PEERS = 4
WITHOUT_ROUNDS = {"SGLANG_AFD_ROUNDS": "off"}
CASES = ("overlap", "rounds", "warm_up", "sweep")
USUAL_CASES = ("overlap", "rounds", "sweep")
WARM_UP_MS = {"attn_ms": 30.0, "expert_ms": 40.0}  # attention above twice the least patience


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    batch: int  # requests of each attention server
    tokens: int  # of each request
    blocks: int  # turns
    overlap_ms: float  # each side's delay for the whole batch
    rounds_attn_ms: float  # the expert delay is four times that
    fcfs_tokens: int  # of each request without rounds, which takes three times as long
    sweep_attn_ms: float  # for the whole batch
    sweep_tokens: int
    sweep_ratios: tuple[float, ...]  # expert delay over attention delay
    sweep_shapes: tuple[tuple[int, tuple[int, ...]], ...]  # M, and every N with it


WHOLE = Plan(
    batch=4,
    tokens=14,
    blocks=5,
    overlap_ms=20.0,
    rounds_attn_ms=20.0,
    fcfs_tokens=8,
    sweep_attn_ms=20.0,
    sweep_tokens=8,
    sweep_ratios=(0.25, 0.5, 1.0, 2.0, 4.0),
    sweep_shapes=((1, (1, 2, 4)), (2, (1, 3))),
)
QUICK = Plan(
    batch=4,
    tokens=5,
    blocks=1,
    overlap_ms=4.0,
    rounds_attn_ms=2.0,
    fcfs_tokens=5,
    sweep_attn_ms=4.0,
    sweep_tokens=5,
    sweep_ratios=(0.5, 2.0),
    sweep_shapes=((1, (1, 2)),),
)


class Bench:
    """Runs the cases; what they found is in `report`."""

    def __init__(self, plan: Plan, launcher: Launcher) -> None:
        self._plan = plan
        self._launcher = launcher
        self.report: dict[str, Any] = {}
        self.faults: list[str] = []

    def overlap(self) -> None:
        """One micro-batch and two, in turn, on one MLP server."""
        plan = self._plan
        runs: dict[int, list[Measurement]] = {1: [], 2: []}
        row_ms = plan.overlap_ms / plan.batch
        with self._launcher.group([1, 2]) as group:
            for _ in range(plan.blocks):
                for micro_batches, server in zip((1, 2), group.attn, strict=True):
                    load = self._load(micro_batches, attn_row_ms=row_ms, expert_row_ms=row_ms)
                    runs[micro_batches].append(self._measure("overlap", group, [server], load))
        one, two = (_median(run.step_ms for run in runs[number]) for number in (1, 2))
        self.report["two_micro_batches_over_one"] = round(two / one, 4)
        self.report["overlap"] = {
            "ideal": round((NUM_LAYERS + 1) / (2 * NUM_LAYERS), 4),
            "shortest": round(_shortest(runs[2]) / _shortest(runs[1]), 4),  # least disturbed
            "delay_ms": plan.overlap_ms,
            "one": _shown(runs[1]),
            "two": _shown(runs[2]),
        }

    def rounds(self) -> None:
        """One attention server and four, in turn, on one MLP server; with rounds and without."""
        self._rounds("four_peers_efficiency", self._plan.tokens, {})
        self._rounds("four_peers_efficiency_fcfs", self._plan.fcfs_tokens, WITHOUT_ROUNDS)

    def _rounds(self, key: str, num_tokens: int, env: dict[str, str]) -> None:
        plan = self._plan
        runs: dict[int, list[Measurement]] = {1: [], NUM_PEERS: []}
        load = self._load(
            1,
            num_tokens=num_tokens,
            attn_ms=plan.rounds_attn_ms,
            expert_ms=NUM_PEERS * plan.rounds_attn_ms,
        )
        with self._launcher.group([1] * NUM_PEERS, mlp_env=env) as group:
            for _ in range(plan.blocks):
                for peers in runs:
                    attn = group.attn[:peers]
                    runs[peers].append(self._measure(key, group, attn, load))
        one, four = (_median(run.tokens_per_s for run in runs[peers]) for peers in runs)
        self.report[key] = round(four / (NUM_PEERS * one), 4)
        self.report[key + "_runs"] = {
            "attn_ms": load.attn_ms,
            "expert_ms": load.expert_ms,
            "one": _shown(runs[1]),
            "four": _shown(runs[NUM_PEERS]),
        }

    def warm_up(self) -> None:
        """Two attention servers before one: alone, one would have time to teach patience."""
        runs: dict[int, list[Measurement]] = {2: [], 1: []}
        load = self._load(1, **WARM_UP_MS)
        with self._launcher.group([1, 1]) as group:
            for peers, found in runs.items():
                for _ in range(2):
                    attn = group.attn[:peers]
                    found.append(self._measure("warm_up", group, attn, load))
        two, one = (_median(run.tokens_per_s for run in found) for found in runs.values())
        self.report["two_peers_after_warm_up_efficiency"] = round(two / (2 * one), 4)
        self.report["warm_up"] = {**WARM_UP_MS, "one": _shown(runs[1]), "two": _shown(runs[2])}

    def sweep(self) -> None:
        """Every shape with one micro-batch and with two, over the ratios of the delays."""
        plan = self._plan
        points: list[dict[str, Any]] = []
        for num_mlp, numbers in plan.sweep_shapes:
            for micro_batches in (1, 2):
                servers = [micro_batches] * max(numbers)
                with self._launcher.group(servers, num_mlp=num_mlp) as group:
                    points += [
                        self._point(group, number, micro_batches, ratio)
                        for number in numbers
                        for ratio in plan.sweep_ratios
                    ]
        self.report["sweep"] = points

    def _point(self, group: Group, number: int, micro_batches: int, ratio: float) -> dict[str, Any]:
        attn_ms = self._plan.sweep_attn_ms / micro_batches
        expert_ms = attn_ms * ratio
        load = self._load(
            micro_batches,
            attn_ms=attn_ms,
            expert_ms=expert_ms,
            num_tokens=self._plan.sweep_tokens,
        )
        run = self._measure("sweep", group, group.attn[:number], load)
        return {
            "attn_ms": attn_ms,  # of one micro-batch
            "expert_ms": expert_ms,  # of one expert run
            "n": number,
            "m": len(group.mlp),
            "micro_batches": micro_batches,
            "step_ms": run.step_ms,
            "ideal_ms": NUM_LAYERS * micro_batches * max(attn_ms, expert_ms),
            "in_turn_ms": NUM_LAYERS * micro_batches * (attn_ms + expert_ms),
            "expert_runs": run.counts["expert_runs"],
            "rows": run.counts["rows"],
            "peers_per_run": run.counts["peers_per_run"],
        }

    def _load(self, micro_batches: int, *, num_tokens: int = 0, **delays: float) -> Load:
        return Load(
            num_layers=NUM_LAYERS,
            batch=self._plan.batch,
            num_tokens=num_tokens or self._plan.tokens,
            micro_batches=micro_batches,
            **delays,
        )

    def _measure(self, name: str, group: Group, attn: Sequence[Server], load: Load) -> Measurement:
        run = measure(group, attn, load)
        shape = f"{len(attn)}:{len(group.mlp)}, {load.micro_batches} micro-batch(es)"
        _say(
            f"{name} {shape}: step {run.step_ms} ms, {run.tokens_per_s} tokens/s, "
            f"cores {run.cpu_busy:.0%} busy, {run.counts}"
        )
        for fault in run.faults:
            _say(f"  does not add up: {fault}")
        self.faults += [f"{name} {shape}: {fault}" for fault in run.faults]
        return run


def main(argv: Sequence[str]) -> int:
    """Measure and print one JSON line; returns 1 when the counters do not add up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=USUAL_CASES)
    parser.add_argument("--plot", type=Path, help="PNG of the sweep.")
    parser.add_argument("--quick", action="store_true", help="Few steps and short delays.")
    parser.add_argument("--blocks", type=int, default=0, help="Turns of overlap and rounds.")
    args = parser.parse_args(argv)
    if args.plot and ("sweep" not in args.cases or not importlib.util.find_spec("matplotlib")):
        parser.error("--plot needs the case sweep, and matplotlib (pip install matplotlib)")
    plan = QUICK if args.quick else WHOLE
    if args.blocks:
        plan = dataclasses.replace(plan, blocks=args.blocks)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with Launcher(NUM_LAYERS) as launcher:
        bench = Bench(plan, launcher)
        for case in CASES:
            if case in args.cases:
                getattr(bench, case)()
    if args.plot:
        from overlap.plot import draw

        draw(bench.report["sweep"], NUM_LAYERS, args.plot)
    print(json.dumps(_head(plan) | bench.report | {"faults": bench.faults}))
    return 1 if bench.faults else 0


def _head(plan: Plan) -> dict[str, Any]:
    return {
        "benchmark": "bench_overlap",
        "date": time.strftime("%Y-%m-%d"),
        "commit": provenance.commit(),
        "cpu": provenance.cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "num_layers": NUM_LAYERS,
        "batch": plan.batch,
        "tokens": plan.tokens,
        "blocks": plan.blocks,
    }


def _shown(runs: Sequence[Measurement]) -> dict[str, Any]:
    return {
        "step_ms": [run.step_ms for run in runs],
        "tokens_per_s": [run.tokens_per_s for run in runs],
        "cpu_busy": [run.cpu_busy for run in runs],
        "counts": [run.counts for run in runs],
    }


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _shortest(runs: Sequence[Measurement]) -> float:
    return min(run.step_ms for run in runs)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
