"""run_on_device.sh goes on after a phase that fails, and says what failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from left_overs import processes_with

SCRIPT = Path(__file__).parents[1] / "gpu" / "run_on_device.sh"
# Takes the place of pytest, by the phase that it is called for.
PYTEST = """#!/bin/sh
case "$*" in
  *gpu_summary.py*) exec {python} "$@" ;;
  *test_cuda_ipc_stress.py*) setsid sleep 987 & exit 1 ;;
  *test_cuda_ipc_kernels.py*) code=1 body='<failure message="it is off&#10;by one"/>' ;;
  *) code=0 body='' ;;
esac
for argument in "$@"; do case $argument in --junitxml=*) xml=${{argument#*=}} ;; esac; done
mkdir -p "$OUT/tmp/servers0"
echo said >"$OUT/tmp/servers0/01-stock.log"
printf '{{"measured": {{"x": 1}}, "running": "t.py::slow"}}' >"$OUT/gpu_suite.json"
echo '<testsuite><testcase classname="a.b" name="c">'"$body"'</testcase></testsuite>' >"$xml"
exit $code
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a compiled kernel, and a program that pretends to be pytest."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / ".triton").mkdir()
    (tmp_path / ".triton" / "kernel").write_text("compiled")
    program = tmp_path / "python"
    program.write_text(PYTEST.format(python=sys.executable))
    program.chmod(0o755)
    return tmp_path


def _run(home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    variables = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "PYTHON": str(home / "python")}
    variables["PHASE_PATIENCE_S"] = "0"
    return subprocess.run(
        [str(SCRIPT), "--out", str(home / "out"), *argv],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def _six_words(lines: list[str]) -> list[list[str]]:
    """The lines that have as many words as a row of the table."""
    return [line.split() for line in lines if len(line.split()) == 6]


def test_a_phase_that_fails_is_told_with_its_first_line_and_the_next_ones_run(home: Path) -> None:
    done = _run(home, "--phases", "kernels,covering")

    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert "kernels: FAILED b::c: it is off" in lines
    rows = [(name, outcome, *counts) for name, outcome, _seconds, *counts in _six_words(lines)]
    assert ("kernels", "failed", "0", "1", "0") in rows
    assert ("covering", "passed", "1", "0", "0") in rows
    with tarfile.open(home / "out" / "logs.tar.xz") as logs:
        names = logs.getnames()
    assert "./kernels/servers/01-stock.log" in names
    assert "./covering/log" in names and "./covering/servers" not in names
    suite = json.loads((home / "out" / "gpu_suite.json").read_text())
    assert suite["covering"]["measured"] == {"x": 1}
    assert "kernels: cut off in t.py::slow" in lines
    assert (home / "out" / "jit.tar.xz").exists()


def test_what_a_phase_leaves_running_is_ended(home: Path) -> None:
    done = _run(home, "--phases", "stress")

    assert done.returncode == 1
    with tarfile.open(home / "out" / "logs.tar.xz") as logs:
        log = logs.extractfile("./stress/log")
        assert log is not None
        assert b"was left running" in log.read()
    assert processes_with(f"HOME={home}") == []


def test_phases_for_which_no_time_is_left_are_told(home: Path) -> None:
    done = _run(home, "--phases", "covering", "--within", "5")

    assert done.returncode == 1
    assert any(line.split()[:3] == ["covering", "not", "run"] for line in done.stdout.splitlines())


def test_compiled_kernels_are_restored_before_the_first_phase(home: Path) -> None:
    _run(home, "--phases", "covering")
    (home / ".triton" / "kernel").unlink()

    _run(home, "--phases", "covering", "--jit", str(home / "out" / "jit.tar.xz"))

    assert (home / ".triton" / "kernel").read_text() == "compiled"
