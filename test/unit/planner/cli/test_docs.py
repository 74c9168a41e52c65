"""docs/planner.md shows what its commands print."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[4]
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.?\d*")
# A number's width decides where lines wrap and how far columns are apart.
SPACE = re.compile(r"[\s#=]+")


def _examples() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "planner_examples", ROOT / "benchmark/planner_examples.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLES = _examples()
PAGE = EXAMPLES.PAGE.read_text(encoding="utf-8")
FOUND = {found["command"]: found["output"] for found in EXAMPLES.EXAMPLE.finditer(PAGE)}


def test_the_page_has_examples_of_every_command_but_those_that_measure() -> None:
    commands = {command.split()[3] for command in FOUND}

    assert commands >= {"predict", "search", "explain", "what-if"}
    assert len(FOUND) >= 7


@pytest.mark.parametrize("command", FOUND)
def test_an_example_prints_what_the_page_shows(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmark").symlink_to(ROOT / "benchmark")

    printed = EXAMPLES.output_of(command)

    shown = FOUND[command]
    assert SPACE.sub(" ", NUMBER.sub("", printed)) == SPACE.sub(" ", NUMBER.sub("", shown))
    ours, theirs = ([float(n) for n in NUMBER.findall(text)] for text in (printed, shown))
    # The last digit may differ between processors.
    assert ours == pytest.approx(theirs, rel=0.02, abs=1.01)


def test_an_example_is_what_a_shell_would_run() -> None:
    command = min(FOUND, key=len)

    done = subprocess.run(
        [sys.executable, *command.partition(" | ")[0].split()[1:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )

    assert done.stdout + done.stderr == EXAMPLES.output_of(command.partition(" | ")[0])
