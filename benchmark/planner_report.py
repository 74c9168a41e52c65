"""Writes the measured tables of docs/results/planner.md again.

python benchmark/planner_report.py

The text around the tables stays as it is. A test fails when the tables are not those of the code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where sglang_afd is not installed

from sglang_afd.planner.constants import NAMES, PRIORS
from sglang_afd.planner.deployment import Mode, Workload
from sglang_afd.planner.description import Row
from sglang_afd.planner.fit import Fit
from sglang_afd.planner.gpu import known_gpu
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.predict import predict
from sglang_afd.planner.published import afd, colocated
from sglang_afd.planner.records import MeasuredRow, read_collection
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.validate import (
    Compared,
    Summary,
    fit_and_compare,
    leave_out,
    summarize,
)

HERE = Path(__file__).parent
DATA = HERE / "planner/fastafd_gb200_qwen3_235b.json"
REPORT = HERE.parent / "docs/results/planner.md"

Results = dict[int, tuple[Fit, list[Compared]]]
Tables = dict[str, list[str]]


# Published, and in no row of the file: (name, context, deployment, step in ms).
ELSEWHERE = (
    ("AFD 3:1, 8K, batch 96", 8192, afd(12, 96), 32.8),
    ("AFD 1:1, 128K, batch 6, DeepEP", 131_072, afd(4, 6, fused=False), 30.4),
    ("AFD 8:1, 128K, batch 6, DeepEP", 131_072, afd(32, 6, fused=False), 30.74),
    ("core-only 1:1, 128K, batch 6", 131_072, afd(4, 6, Mode.CORE_ONLY), 25.0),
    ("core-only 15:1, 128K, batch 6", 131_072, afd(60, 6, Mode.CORE_ONLY), 31.24),
    ("vLLM EP16, 16K, batch 48", 16_384, colocated(16, 48), 48 / 1204 * 1000),
)


def main() -> None:
    """Rewrite the report."""
    text = REPORT.read_text(encoding="utf-8")
    REPORT.write_text(with_tables(text, {**tables(), **slow_tables()}), encoding="utf-8")


def tables() -> Tables:
    """By name; all that take a few seconds."""
    rows = read_collection(DATA).rows
    contexts = sorted({int(item.row.scenario.workload.context_tokens) for item in rows})
    results = {context: fit_and_compare(rows, context) for context in contexts}
    return {
        "summary": summary_table(results),
        "elsewhere": elsewhere_table(results),
        "constants": constants_table(results),
        "errors": errors_table(rows, results),
    }


def slow_tables() -> Tables:
    """By name; the others."""
    return {"left out": left_out_table(read_collection(DATA).rows)}


def with_tables(text: str, new: Tables) -> str:
    """The report with these tables between their markers."""
    for name, lines in new.items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        body = "\n".join(lines)
        text, found = pattern.subn(lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text)
        assert found == 1, f"{REPORT}: wanted one place for the table {name!r}, found {found}"
    return text


def line(cells: Iterable[object]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def figures(result: Summary) -> list[str]:
    """The four numbers of a summary."""
    return [
        str(result.rows),
        f"{result.median_abs_pct:.1f}",
        f"{result.p90_abs_pct:.1f}",
        f"{result.worst_pct:+.1f}",
        f"{result.mean_pct:+.1f}",
    ]


HEAD = ["rows", "median %", "90th %", "worst %", "mean %"]


def summary_table(results: Results) -> list[str]:
    """All rows and each kind, by fit context."""
    lines = [line(["fit on", "predicted", *HEAD]), line(["---:", "---", *["---:"] * 5])]
    for context, (_, compared) in results.items():
        kinds = sorted({item.row.kind for item in compared})
        lines.append(line([context, "**all others**", *figures(summarize(compared))]))
        for kind in kinds:
            chosen = [item for item in compared if item.row.kind == kind]
            lines.append(line(["", kind, *figures(summarize(chosen))]))
    return lines


def elsewhere_table(results: Results) -> list[str]:
    """Signed errors of what the file does not hold."""
    lines = [
        line(["", "measured ms", *[f"fit {context}" for context in results]]),
        line(["---", "---:", *["---:"] * len(results)]),
    ]
    shape, gpu = known_shape("Qwen3-235B-A22B-FP8"), known_gpu("GB200")
    for name, context, deployment, measured_ms in ELSEWHERE:
        workload = Workload(context_tokens=context)
        cells = []
        for fitted, _ in results.values():
            scenario = Scenario(shape=shape, gpu=gpu, workload=workload, constants=fitted.constants)
            step_ms = predict(scenario, deployment).step_us / 1000
            cells.append(f"{100 * (step_ms / measured_ms - 1):+.1f}")
        lines.append(line([name, f"{measured_ms:.1f}", *cells]))
    return lines


def constants_table(results: Results) -> list[str]:
    """Prior, bounds, fitted values and source of every constant."""
    heads = [f"fit {context}" for context in results]
    lines = [
        line(["constant", "prior", "bounds", *heads, "source of the prior"]),
        line(["---", "---:", "---", *["---:"] * len(heads), "---"]),
    ]
    for name in NAMES:
        prior = PRIORS[name]
        fitted = [
            f"{getattr(fit.constants, name):.3g} ± {fit.spread(name):.0%}"
            for fit, _ in results.values()
        ]
        known = f"{prior.value:g} ± {prior.spread:.0%}"
        bounds = f"{prior.low:g} to {prior.high:g}"
        lines.append(line([f"`{name}`", known, bounds, *fitted, prior.source]))
    return lines


GROUPS: dict[str, Callable[[Row], str]] = {
    "mode": lambda row: row.deployment.mode.value,
    "deployment": lambda row: row.deployment.label,
    "context": lambda row: f"{row.scenario.workload.context_tokens:g}",
    "batch": lambda row: next(
        name
        for limit, name in ((8, "2 to 6"), (32, "8 to 24"), (128, "32 to 103"), (999, "128 to 512"))
        if row.deployment.batch_per_attn_gpu < limit
    ),
}


def left_out_table(rows: tuple[MeasuredRow, ...]) -> list[str]:
    """Each group predicted from all rows but its own."""
    lines = [line(["left out", "", *HEAD]), line(["---", "---", *["---:"] * 5])]
    for kind, group in GROUPS.items():
        for name, compared in leave_out(rows, group).items():
            lines.append(line([kind, name, *figures(summarize(compared))]))
    return lines


def errors_table(rows: tuple[MeasuredRow, ...], results: Results) -> list[str]:
    """Every row; a dot where it was fitted."""
    errors = {
        context: {item.row.id: item.error_pct for item in compared}
        for context, (_, compared) in results.items()
    }
    heads = [f"fit {context}" for context in results]
    lines = [
        line(["row", "context", "deployment", "batch", "measured ms", *heads]),
        line(["---", "---:", "---", "---:", "---:", *["---:"] * len(heads)]),
    ]
    for item in rows:
        row = item.row
        cells = [f"{errors[c][row.id]:+.1f}" if row.id in errors[c] else "·" for c in results]
        context = f"{row.scenario.workload.context_tokens:g}"
        batch = row.deployment.batch_per_attn_gpu
        measured = f"{item.step_us / 1000:.2f}"
        lines.append(line([row.id, context, row.deployment.label, batch, measured, *cells]))
    return lines


if __name__ == "__main__":
    sys.exit(main())
