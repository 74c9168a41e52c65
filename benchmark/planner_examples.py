"""Runs the examples of docs/planner.md again and writes what they print.

python benchmark/planner_examples.py

A test fails when the page does not show what the commands print.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where sglang_afd is not installed

from sglang_afd.planner.__main__ import PROGRAM, main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/planner.md"
EXAMPLE = re.compile(r"^```\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)^```$", re.M | re.S)


def output_of(command: str) -> str:
    """What `python -m sglang_afd.planner ... | head -N` prints, called in this process."""
    called, _, shortened = command.partition(" | head -")
    argv = shlex.split(called)
    assert argv[:3] == shlex.split(PROGRAM), f"not a command of the planner: {command}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(argv[3:])
    lines = printed.getvalue().splitlines(keepends=True)
    return "".join(lines[: int(shortened)] if shortened else lines)


def with_outputs(text: str, run: Callable[[str], str] = output_of) -> str:
    """The page with every example's output as it is now."""
    return EXAMPLE.sub(lambda found: f"```\n$ {found['command']}\n{run(found['command'])}```", text)


if __name__ == "__main__":
    os.chdir(ROOT)
    PAGE.write_text(with_outputs(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
