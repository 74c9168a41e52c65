"""Sums up phases of the GPU tests: `python gpu_summary.py DIR JSON PHASE...`; see run_on_device.sh.

Prints a table and the first line of every failure, and writes what the phases measured into one
file. Ends with 1 where a phase failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

OUTCOMES = {0: "passed", 1: "failed", 124: "cut off", 137: "killed"}  # by exit code


@dataclass
class Phase:
    """What is known of one phase."""

    name: str
    outcome: str = "not run"
    seconds: int = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    running: str | None = None  # the test in which it was cut off
    failures: list[tuple[str, str]] = field(default_factory=list)  # test, first line
    skips: list[str] = field(default_factory=list)  # reasons

    @property
    def is_good(self) -> bool:
        """Did it run to its end, not all of it skipped, with nothing failed?"""
        return self.outcome == "passed"


def read(directory: Path, name: str) -> Phase:
    """From what a phase left in its directory."""
    phase = Phase(name)
    ended = directory / name / "ended"
    if not ended.exists():
        return phase
    code, phase.seconds = (int(word) for word in ended.read_text().split())
    phase.outcome = {0: "passed", 1: "failed", 124: "cut off", 137: "killed"}.get(
        code, f"rc {code}"
    )
    suite = _suite(directory / name)
    phase.running = suite.get("running") if not phase.is_good else None
    report = directory / name / "junit.xml"
    if report.exists():
        _read_report(report, phase)
    else:
        _read_suite(suite, phase)
    if phase.is_good and phase.passed == 0:
        phase.outcome = "skipped"
    return phase


def _read_report(report: Path, phase: Phase) -> None:
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        wrong = [*case.iter("failure"), *case.iter("error")]
        skip = case.find("skipped")
        if wrong:
            phase.failed += 1
            phase.failures.append((name, _first_line(wrong[0].get("message", ""))))
        elif skip is not None:
            phase.skipped += 1
            phase.skips.append(_first_line(skip.get("message", "")))
        else:
            phase.passed += 1


def _read_suite(suite: dict[str, Any], phase: Phase) -> None:
    """Of a phase that was killed before it could write its report."""
    for name, test in suite.get("tests", {}).items():
        if test["outcome"] == "passed":
            phase.passed += "teardown_s" in test
        elif test["outcome"] == "skipped":
            phase.skipped += 1
        else:
            phase.failed += 1
            phase.failures.append((name.rpartition("/")[2], test.get("error", "")))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def _suite(directory: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((directory / "gpu_suite.json").read_text())
    except (OSError, ValueError):
        return {}
    return content


def table(phases: Sequence[Phase]) -> str:
    """For people."""
    lines = [f"{'phase':<12} {'outcome':<8} {'s':>5} {'passed':>7} {'failed':>7} {'skipped':>8}"]
    lines += [
        f"{each.name:<12} {each.outcome:<8} {each.seconds:>5} {each.passed:>7} {each.failed:>7} "
        f"{each.skipped:>8}"
        for each in phases
    ]
    for each in phases:
        lines += [f"{each.name}: cut off in {each.running}"] if each.running else []
        lines += [f"{each.name}: FAILED {test}: {line}" for test, line in each.failures]
        lines += [f"{each.name}: skipped: {reason}" for reason in sorted(set(each.skips))]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """See the module."""
    directory, target, names = Path(argv[0]), Path(argv[1]), argv[2:]
    phases = [read(directory, name) for name in names]
    target.write_text(
        json.dumps({name: _suite(directory / name) for name in names}, indent=1) + "\n"
    )
    print(table(phases))
    return 0 if all(phase.is_good for phase in phases) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
