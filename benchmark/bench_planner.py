"""Signed error of the planner on a file of public measurements, fitted on one context only.

python benchmark/bench_planner.py --data FILE --fit 8192
python benchmark/bench_planner.py --data FILE --fit 8192 --cross-validate

The second form also leaves out deployments, modes and batches in turn, over all contexts. The last
line is JSON. Positive errors: predicted slower than measured. A row whose measured step is missing
or contradicts its rate is predicted as the others are, and not compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from provenance import commit

sys.path.append(str(Path(__file__).parents[1]))  # where sglang_afd is not installed

from sglang_afd.errors import ConfigError
from sglang_afd.files import send_nowhere
from sglang_afd.planner.constants import NAMES, PRIORS
from sglang_afd.planner.description import Row
from sglang_afd.planner.fit import Fit
from sglang_afd.planner.records import MeasuredRow, Unmeasured, read_collection
from sglang_afd.planner.validate import (
    Compared,
    fit_and_compare,
    leave_out,
    predict_rows,
    summarize,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="JSON file of the public schema")
    parser.add_argument("--fit", type=float, required=True, help="context to fit on, in tokens")
    parser.add_argument("--cross-validate", action="store_true", help="leave groups out in turn")
    options = parser.parse_args(arguments)
    try:
        return run(options.data, options.fit, options.cross_validate)
    except ConfigError as error:
        print(f"bench_planner: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        send_nowhere(sys.stdout)  # whoever reads has enough
        return 0


def run(data: Path, context: float, cross_validate: bool) -> int:
    """Raises: ConfigError, when there is nothing to fit on or to compare."""
    collection = read_collection(data, strict=False)
    fitted, compared = fit_and_compare(collection.rows, context)
    print_constants(fitted)
    print_rows(compared)
    print_unmeasured(fitted, collection.unmeasured, context)
    for skipped in collection.skipped:
        print(f"not predicted: {skipped.id}: {skipped.reason}")
    if cross_validate:
        print_cross_validation(collection.rows)
    if not compared:
        raise ConfigError(f"{data}: no measured step outside the fit context to compare with")
    num_left_out = len(collection.unmeasured) + len(collection.skipped)
    print(json.dumps(summary(context, fitted, compared, num_left_out), allow_nan=False))
    return 0


def print_constants(fitted: Fit) -> None:
    """Where the fit moved each constant."""
    print(f"{'constant':<36}{'prior':>10}{'fitted':>10}{'+-':>8}")
    for name in NAMES:
        value = getattr(fitted.constants, name)
        spread = fitted.spread(name)
        print(f"{name:<36}{PRIORS[name].value:>10.4g}{value:>10.4g}{spread:>8.1%}")


def print_rows(compared: Sequence[Compared]) -> None:
    """Every row that the fit has not seen."""
    print(f"\n{'row':<28}{'context':>8}{'batch':>7}  {'deployment':<18}", end="")
    print(f"{'predicted':>11}{'measured':>10}{'error':>9}")
    for item in compared:
        print(
            f"{_predicted(item.row, item.predicted_us)}{item.measured_us / 1000:>7.2f} ms"
            f"{item.error_pct:>+8.1f}%"
        )


def print_unmeasured(fitted: Fit, rows: Sequence[Unmeasured], context: float) -> None:
    """Predictions that nothing can be compared with, and why."""
    for item in rows:
        if item.row.scenario.workload.context_tokens == context:
            print(f"not fitted: {item.row.id}: {item.reason}")
            continue
        (predicted_us,) = predict_rows(fitted, [item.row])
        print(f"{_predicted(item.row, predicted_us)}  not compared: {item.reason}")


def _predicted(row: Row, predicted_us: float) -> str:
    return (
        f"{row.id:<28}{row.scenario.workload.context_tokens:>8g}"
        f"{row.deployment.batch_per_attn_gpu:>7}  {row.deployment.label:<18}"
        f"{predicted_us / 1000:>8.2f} ms"
    )


GROUPS: dict[str, Callable[[Row], str]] = {
    "mode": lambda row: row.deployment.mode.value,
    "deployment": lambda row: row.deployment.label,
    "context": lambda row: f"{row.scenario.workload.context_tokens:g}",
    "batch": lambda row: next(
        f"below {limit}"
        for limit in (8, 32, 128, 10**9)
        if row.deployment.batch_per_attn_gpu < limit
    ),
    "model": lambda row: row.scenario.shape.name,
}


def print_cross_validation(rows: Sequence[MeasuredRow]) -> None:
    """Each group predicted from a fit on all rows but its own; a single group has no such fit."""
    print(f"\n{'left out':<40}{'rows':>5}{'median':>8}{'90th':>8}{'worst':>8}{'mean':>8}")
    for kind, group in GROUPS.items():
        for name, compared in leave_out(rows, group).items():
            if len(compared) == len(rows):
                continue
            result = summarize(compared)
            print(
                f"{kind + ' ' + name:<40}{result.rows:>5}{result.median_abs_pct:>7.1f}%"
                f"{result.p90_abs_pct:>7.1f}%{result.worst_pct:>+7.1f}%{result.mean_pct:>+7.1f}%"
            )


def summary(
    context: float, fitted: Fit, compared: Sequence[Compared], num_skipped: int
) -> dict[str, object]:
    """Of all rows, and of each kind."""
    kinds = sorted({item.row.kind for item in compared})
    return {
        "benchmark": "planner",
        "commit": commit(),
        "fit_context": context,
        "fit_rows": fitted.num_rows,
        **asdict(summarize(compared)),
        "skipped": num_skipped,
        "by_kind": {
            kind: asdict(summarize([item for item in compared if item.row.kind == kind]))
            for kind in kinds
        },
    }


if __name__ == "__main__":
    sys.exit(main())
