"""The launcher on one GPU, as a user runs it: an answer in English, memory as planned, no trace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import gpu_report
import pytest
from gpu_fleet import START_TIMEOUT_S, say
from left_overs import processes_with

from sglang_afd.demo.ensure import ensure_embedded_model
from sglang_afd.errors import ConfigError
from sglang_afd.fleet.ports import hold_free_ports

MARK = "SGLANG_AFD_TEST_MARK"  # inherited by every process that a launcher starts
TIMEOUT_S = 240.0
TOLERANCE_PERCENT = 10.0
# Its heads of 64 are not in every build of FA3; few batches, so that they are captured soon.
ATTN_FLAGS = "--attention-backend triton --sampling-backend pytorch --cuda-graph-bs-decode 1 8"
_MEMORY = re.compile(r"memory of (\S+): .* planned .* \(([-+][\d.]+)%\)")
pytestmark = pytest.mark.timeout(TIMEOUT_S + START_TIMEOUT_S)


@pytest.fixture(scope="module")
def model() -> Path:
    """The embedded model."""
    try:
        return ensure_embedded_model()
    except ConfigError as error:
        pytest.skip(str(error))


def test_the_embedded_model_answers_and_leaves_nothing_behind(model: Path) -> None:
    mark = uuid.uuid4().hex
    with hold_free_ports("127.0.0.1", 1) as ports:
        port = ports[0]
    command = [sys.executable, "-m", "sglang_afd.launch", "--attn", "2", "--mlp", "1"]
    command += ["--port", str(port), "--prompt", "What is the capital of France?"]
    command += [f"--attn-args={ATTN_FLAGS}", "--", "--dtype", "bfloat16"]
    say("launcher: starting")

    done = subprocess.run(
        command, env=os.environ | {MARK: mark}, capture_output=True, text=True, timeout=TIMEOUT_S
    )

    say(f"launcher: ended with {done.returncode}")
    assert done.returncode == 0, done.stderr[-8000:]
    gpu_report.record("the embedded model's answer", done.stdout.strip())
    assert "Paris" in done.stdout
    assert "started an MPS daemon for this launch" in done.stderr
    off = {name: float(percent) for name, percent in _MEMORY.findall(done.stderr)}
    gpu_report.record("memory, off what was planned, %", off)
    assert len(off) == 3, done.stderr[-8000:]
    assert all(abs(percent) <= TOLERANCE_PERCENT for percent in off.values()), off
    assert processes_with(f"{MARK}={mark}") == []
