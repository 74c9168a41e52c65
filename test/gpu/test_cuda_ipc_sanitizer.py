"""compute-sanitizer finds nothing in the kernels of the exchange, and would find it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 150
SCRIPT = Path(__file__).with_name("run_sanitizer.sh")
FOUND = 9  # the script's exit code
pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    if not (
        shutil.which("compute-sanitizer") or Path("/usr/local/cuda/bin/compute-sanitizer").exists()
    ):
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    return subprocess.run(
        [str(SCRIPT), *argv],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_tool_finds_nothing(tool: str) -> None:
    result = run(tool)

    assert result.returncode == 0, result.stdout[-4000:]
    assert "attached anew: right" in result.stdout  # the last case


def test_memcheck_finds_a_read_beyond_a_tensor() -> None:
    result = run("memcheck", "--fault")

    assert result.returncode == FOUND, result.stdout[-4000:]
    assert "afd_push" in result.stdout
