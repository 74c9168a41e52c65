"""python -m sglang_afd.launch, as a user runs it, with the embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest
from left_overs import processes_with

from sglang_afd.ports import free_ports

MARK = "SGLANG_AFD_TEST_MARK"  # inherited by every process that a launcher starts
TIMEOUT_S = 600.0


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_prompt_is_answered_and_no_process_is_left() -> None:
    mark = uuid.uuid4().hex
    [port] = free_ports(1)
    command = [sys.executable, "-m", "sglang_afd.launch", "--attn", "1", "--mlp", "2"]
    command += ["--port", str(port), "--prompt", "What is the capital of France?"]

    done = subprocess.run(
        command, env=os.environ | {MARK: mark}, capture_output=True, text=True, timeout=TIMEOUT_S
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert "Paris" in done.stdout
    assert "mlp-1: ready after" in done.stderr
    assert processes_with(f"{MARK}={mark}") == []
