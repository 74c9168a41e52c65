"""How near rounds come to the ideal after a warm-up that was faster or slower than the load.

Simulated, by two rules: a patience that learns from whole rounds alone, and that of `Rounds`, which
also learns from the turns of the peers. Each attention server warms up by itself, and the load
begins at a random moment of a step for each. Prints the tables of
docs/results/2026-11-30-rounds-patience.md.

    python benchmark/rounds_patience.py [--steps 60] [--seeds 2] [--processes 2] [--quick]

Ideal: a layer takes attention and experts of all peers one after the other with one micro-batch,
and the longer of the two for each of more; no gaps, jitter or transfers.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "test" / "support")]  # also where sglang_afd is not installed

from round_rules import deaf_rounds  # noqa: E402
from round_simulator import Hardware, Scene, simulate  # noqa: E402

from sglang_afd.rounds.rounds import Rounds  # noqa: E402

LAYER_MS = (0.3, 15.0, 60.0, 250.0)  # attention and experts of a layer
PEERS = (1, 2, 3, 5, 8)
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # attention over experts
JITTERS = (0.0, 0.1, 0.3)
WARM_SHARES = (0.02, 0.1, 1.0, 10.0)  # time of a warm-up step over that of a step of the load
HANGS = (0.0, 0.02)  # share of the steps in which a peer hangs
HANG_LAYERS = (5.0, 20.0)  # for so many layers' time
MICRO_BATCHES = (1, 2)
BATCH = 32
NUM_LAYERS = 8
WARM_STEPS = 6
TABLES = (
    ("layer_ms", "warm_share"),
    ("peers", "warm_share"),
    ("ratio", "warm_share"),
    ("jitter", "warm_share"),
    ("hangs", "warm_share"),
)
ROW_SHARE = 0.2  # of an expert run, for the rows of all peers; the rest is reading the weights


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the sweep."""

    layer_ms: float
    warm_share: float
    peers: int
    ratio: float
    jitter: float
    micro_batches: int
    hangs: float

    @property
    def attention_us(self) -> float:
        """One layer of one micro-batch."""
        return self.layer_ms * 1e3 * self.ratio / (1 + self.ratio)

    @property
    def experts_us(self) -> float:
        """One run for all peers."""
        return self.layer_ms * 1e3 / (1 + self.ratio)

    @property
    def ideal_step_us(self) -> float:
        """Without gaps, jitter and transfers."""
        both = (self.attention_us, self.experts_us)
        a_part_us = sum(both) if self.micro_batches == 1 else max(both)
        return NUM_LAYERS * self.micro_batches * a_part_us

    def scene(self, steps: int, seed: int) -> Scene:
        """What is simulated."""
        tokens = self.peers * BATCH / self.micro_batches
        hardware = Hardware(
            layers=NUM_LAYERS,
            dense=self.attention_us,
            core0=0.0,
            core_k=0.0,
            launch=self.experts_us * (1 - ROW_SHARE),
            read=0.0,
            slope=self.experts_us * ROW_SHARE / tokens,
            gpus=1,
        )
        return Scene(
            hardware=hardware,
            servers=self.peers,
            batch=BATCH,
            context=1024,
            micro_batches=self.micro_batches,
            jitter=self.jitter,
            stall=self.hangs,
            stall_us=(HANG_LAYERS[0] * self.layer_ms * 1e3, HANG_LAYERS[1] * self.layer_ms * 1e3),
            warm_steps=WARM_STEPS,
            warm_share=self.warm_share,
            steps=steps,
            seed=seed,
        )


RULES: tuple[Callable[[Sequence[int]], Rounds], ...] = (deaf_rounds, Rounds)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Shares of the ideal throughput under both rules, the mean of all seeds."""

    case: Case
    before: float
    after: float

    @property
    def gain(self) -> float:
        """1 where nothing changed."""
        return self.after / self.before


def play(case: Case, steps: int, seeds: int) -> Outcome:
    """One cell under both rules."""
    ideal = BATCH * 1e6 / case.ideal_step_us * case.peers / (case.peers + 1)

    def share(rule: Callable[[Sequence[int]], Rounds]) -> float:
        scenes = (case.scene(steps, seed) for seed in range(1, seeds + 1))
        return (
            statistics.fmean(simulate(each, rule).tokens_per_s_per_gpu for each in scenes) / ideal
        )

    before, after = map(share, RULES)
    return Outcome(case=case, before=before, after=after)


def cases() -> list[Case]:
    """Every cell."""
    names = ("layer_ms", "warm_share", "peers", "ratio", "jitter", "micro_batches", "hangs")
    values = (LAYER_MS, WARM_SHARES, PEERS, RATIOS, JITTERS, MICRO_BATCHES, HANGS)
    return [Case(**dict(zip(names, cell, strict=True))) for cell in itertools.product(*values)]


def table(outcomes: Iterable[Outcome], *names: str) -> str:
    """Markdown, one row for each combination of what `names` says of a case."""
    groups: dict[tuple[float, ...], list[Outcome]] = {}
    for outcome in outcomes:
        key = tuple(vars(outcome.case)[name] for name in names)
        groups.setdefault(key, []).append(outcome)
    head = [*names, "cells", "before", "worst", "after", "worst", "largest loss", "largest gain"]
    lines = [head, ["---"] * len(head)]
    for key, group in sorted(groups.items()):
        gains = [outcome.gain for outcome in group]
        before, after = ([vars(each)[rule] for each in group] for rule in ("before", "after"))
        lines.append(
            [
                *(f"{value:g}" for value in key),
                str(len(group)),
                *(f"{look(shares):.2f}" for shares in (before, after) for look in (_mean, min)),
                f"{min(0.0, min(gains) - 1):.1%}",
                f"x {max(gains):.2f}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def main() -> None:
    """Play every cell and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="length of a run in ideal steps")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="every 101st cell")
    arguments = parser.parse_args()
    chosen = cases()[:: 101 if arguments.quick else 1]
    with ProcessPoolExecutor(arguments.processes) as pool:
        repeated = itertools.repeat
        outcomes = list(
            pool.map(
                play, chosen, repeated(arguments.steps), repeated(arguments.seeds), chunksize=8
            )
        )
    for names in TABLES:
        print(table(outcomes, *names), end="\n\n")
    for outcome in sorted(outcomes, key=lambda outcome: outcome.gain)[:10]:
        print(f"x {outcome.gain:.3f} {outcome}")


if __name__ == "__main__":
    main()
