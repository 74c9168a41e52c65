"""How far the planner is off when a fit sees less, worse or other rows than a file has.

python benchmark/bench_planner_holdouts.py --data FILE

Two tables: rows of the file with a part of the fit context left out, repeated or spoilt; and files
of other models, whose times come from the planner's own physics with constants drawn from their
priors and 2.5 % of noise, or from a physics that the planner does not have.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # where sglang_afd is not installed

from sglang_afd.planner.constants import NAMES, PRIORS, Constants
from sglang_afd.planner.deployment import Deployment, Mode, Workload
from sglang_afd.planner.description import VLLM_PIECE_TOKENS, Row
from sglang_afd.planner.fit import fit
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.published import afd, colocated
from sglang_afd.planner.records import MeasuredRow, read_collection
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.step import step_of
from sglang_afd.planner.validate import predict_rows

Rows = list[MeasuredRow]
Draw = Callable[[Rows, int], Rows]

BATCHES = (2, 4, 8, 16, 32, 48, 64, 96, 128)
MOST_TOKENS = 900_000  # of a GPU's cache
NOISE = 0.025
SEEDS = range(8)
FITTED = (afd(28, 2), colocated(16, 2))
OTHERS = (
    *(afd(attn_gpus, 2) for attn_gpus in (4, 12, 28, 60, 68)),
    *(colocated(ranks, 2) for ranks in (4, 8, 16, 32, 64)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="JSON file of the public schema")
    options = parser.parse_args(arguments)
    print_holdouts(list(read_collection(options.data).rows))
    print_made_up()
    return 0


def print_holdouts(rows: Rows) -> None:
    """Medians over the draws; the largest error of any draw."""
    head = ("the fit sees of its context", "fit on", "rows", "median %", "90th %", "worst %")
    print("| " + " | ".join(head) + " |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for context in sorted({_context(row) for row in rows}):
        seen = [row for row in rows if _context(row) == context]
        unseen = [row for row in rows if _context(row) != context]
        for name, (draw, number) in HOLDOUTS.items():
            draws = [draw(seen, seed) for seed in range(number)]
            found = [_errors(kept, unseen) for kept in draws]
            print(f"| {name} | {context:g} | {len(draws[0])} | {_line(found)} |")


def _some(number: int) -> tuple[Draw, int]:
    return lambda rows, seed: random.Random(seed).sample(rows, number), 20


def _of(keep: Callable[[Deployment], bool]) -> tuple[Draw, int]:
    return lambda rows, seed: [row for row in rows if keep(row.row.deployment)], 1


def _spoilt(factor: float) -> tuple[Draw, int]:
    def draw(rows: Rows, seed: int) -> Rows:
        bad = (2 * seed) % len(rows)
        return [
            replace(row, step_us=row.step_us * factor) if number == bad else row
            for number, row in enumerate(rows)
        ]

    return draw, 14


HOLDOUTS: dict[str, tuple[Draw, int]] = {
    "all rows": _of(lambda where: True),
    "5 rows, 20 draws": _some(5),
    "10 rows, 20 draws": _some(10),
    "20 rows, 20 draws": _some(20),
    "AFD only": _of(lambda where: where.mode is Mode.AFD),
    "colocated only": _of(lambda where: where.mode is Mode.COLOCATED),
    "batches up to 16": _of(lambda where: where.batch_per_attn_gpu <= 16),
    "batches from 48": _of(lambda where: where.batch_per_attn_gpu >= 48),
    "each row 50 times": (lambda rows, seed: rows * 50, 1),
    "one row half, 14 draws": _spoilt(0.5),
    "one row double, 14 draws": _spoilt(2.0),
}


def print_made_up() -> None:
    """Over all draws of the constants."""
    head = ("model", "fit on", "times", "median %", "90th %", "worst %")
    print("\n| " + " | ".join(head) + " |\n| --- | ---: | --- | ---: | ---: | ---: |")
    for name in ("MiniMax-M2.5", "Qwen3-30B-A3B-FP8"):
        for context, kind in ((8192, "same"), (2048, "same"), (8192, "hidden"), (8192, "hosts")):
            found = [_errors(*_made_up(name, context, kind, seed)) for seed in SEEDS]
            print(f"| {name} | {context} | {KINDS[kind]} | {_line(found)} |")


KINDS = {
    "same": "as the physics",
    "hidden": "colocated arithmetic hides behind weights",
    "hosts": "no step below 12 ms",
}


def _made_up(name: str, context: int, kind: str, seed: int) -> tuple[Rows, Rows]:
    """Rows to fit, of one ratio and one width, and all others."""
    generator = np.random.default_rng(seed)
    constants = _drawn(generator)
    fitted, others = [], []
    for at in (2048, 8192, 16_384, 32_768):
        for where in OTHERS:
            for batch in BATCHES:
                if batch * at > MOST_TOKENS:
                    continue
                row = _row(name, at, where.with_batch(batch))
                noise = float(np.exp(generator.normal(0, NOISE)))
                measured = MeasuredRow(row=row, step_us=_step_us(row, constants, kind) * noise)
                is_fitted = at == context and where in FITTED
                (fitted if is_fitted else others).append(measured)
    return fitted, others


def _row(name: str, context: int, where: Deployment) -> Row:
    scenario = Scenario(
        shape=known_shape(name),
        gpu=GPUS["GB200"],
        workload=Workload(context_tokens=context),
        colocated_piece_tokens=VLLM_PIECE_TOKENS,
    )
    return Row(id=where.label, kind="made_up", scenario=scenario, deployment=where)


def _step_us(row: Row, constants: Constants, kind: str) -> float:
    step = step_of(row.scenario.with_constants(constants), row.deployment)
    if kind == "hosts":
        return max(step.step_us, 12_000.0)
    if kind == "hidden" and row.deployment.mode is Mode.COLOCATED:
        experts = step.stages.experts
        hidden_us = min(experts.weights_us, experts.compute_us)
        return step.step_us - row.scenario.shape.num_moe_layers * hidden_us
    return step.step_us


def _drawn(generator: np.random.Generator) -> Constants:
    values = {}
    for name in NAMES:
        prior = PRIORS[name]
        value = prior.value * float(np.exp(generator.normal(0, prior.spread)))
        values[name] = min(max(value, prior.low), prior.high)
    return Constants(**values)


def _context(row: MeasuredRow) -> float:
    return row.row.scenario.workload.context_tokens


def _errors(seen: Rows, unseen: Rows) -> list[float]:
    """Signed, in percent."""
    fitted = fit([row.observation for row in seen])
    predicted = predict_rows(fitted, [row.row for row in unseen])
    return [100 * (guess / row.step_us - 1) for guess, row in zip(predicted, unseen, strict=True)]


def _line(draws: Sequence[Sequence[float]]) -> str:
    medians = [float(np.median(np.abs(errors))) for errors in draws]
    ninetieths = [float(np.percentile(np.abs(errors), 90)) for errors in draws]
    worst = max((error for errors in draws for error in errors), key=abs)
    return f"{np.median(medians):.1f} | {np.median(ninetieths):.1f} | {worst:+.1f}"


if __name__ == "__main__":
    sys.exit(main())
