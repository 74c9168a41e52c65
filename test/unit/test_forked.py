"""Forked processes of the tests' and benchmarks' zygotes: what they answer, and how they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In a process without threads, which may fork."""
    return subprocess.run(
        [sys.executable, "-c", f"import os, sys, forked\n{code}"],
        env={"PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_child_answers_and_leaves_no_trace_here() -> None:
    done = run("mine = []; print(forked.ask_in_a_child(lambda: {'n': mine.append(1)}), mine)")

    assert done.stdout == "{'n': None} []\n", done.stderr


def test_a_question_that_raises_says_why_and_that_nothing_can_be_forked() -> None:
    done = run("forked.ask_in_a_child(lambda: {'n': 1 / 0})")

    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "RuntimeError: a forked process could not answer" in done.stderr


@pytest.mark.parametrize(
    ("run_it", "code"), [("lambda: 3", 3), ("lambda: sys.exit(4)", 4), ("lambda: 1 / 0", 1)]
)
def test_a_forked_process_ends_with_what_it_returned(run_it: str, code: int) -> None:
    done = run(
        f"if (pid := os.fork()) == 0:\n    forked.end_with({run_it})\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )

    assert done.stdout == f"{code}\n"


def test_a_detached_process_prints_into_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"

    done = run(
        f"def say():\n    forked.detach({str(log)!r})\n"
        "    print('here', os.getsid(0) == os.getpid())\n    return 0\n"
        "if (pid := os.fork()) == 0:\n    forked.end_with(say)\nos.waitpid(pid, 0)"
    )

    assert log.read_text() == "here True\n"
    assert done.stdout == ""
