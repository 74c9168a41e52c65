"""docs/results/planner.md shows what the code gives."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmark/planner_report.py"


def _report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planner_report", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NUMBER = re.compile(r"[-+]?\d+\.?\d*")


def _require_current(report: ModuleType, tables: dict[str, list[str]]) -> None:
    committed = report.REPORT.read_text(encoding="utf-8")
    current = report.with_tables(committed, tables)
    assert NUMBER.sub("", current) == NUMBER.sub("", committed)
    ours, theirs = (
        [float(number) for number in NUMBER.findall(text)] for text in (current, committed)
    )
    # The last digit may differ between processors.
    assert ours == pytest.approx(theirs, rel=0.01, abs=0.11)


def test_the_tables_of_the_report_are_those_of_the_code() -> None:
    report = _report()

    tables = report.tables()

    _require_current(report, tables)


@pytest.mark.slow
def test_the_cross_validation_of_the_report_is_that_of_the_code() -> None:
    report = _report()

    tables = report.slow_tables()

    _require_current(report, tables)
