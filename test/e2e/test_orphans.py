"""No process stays behind, however early its parent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from servers import START_TIMEOUT_S, wait_until

from sglang_afd.ports import free_ports


def _is_gone(child: psutil.Process) -> bool:
    try:
        return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return True


@pytest.mark.parametrize("num_children", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_children_of_a_killed_attention_server_end_while_they_still_import(
    qwen3: Path, tmp_path: Path, num_children: int
) -> None:
    command = [
        *(sys.executable, "-m", "sglang_afd.launch_server", "--role", "attn"),
        *("--model-path", str(qwen3), "--port", str(free_ports(1)[0])),
        *("--afd-mlp", f"http://127.0.0.1:{free_ports(1)[0]}"),
    ]
    with (tmp_path / "attn.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    parent = psutil.Process(server.pid)
    children: list[psutil.Process] = []
    try:
        wait_until(lambda: len(parent.children(recursive=True)) >= num_children, "children")
        children = parent.children(recursive=True)

        server.send_signal(signal.SIGKILL)

        server.wait(START_TIMEOUT_S)
        wait_until(lambda: all(_is_gone(child) for child in children), "no orphan")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(START_TIMEOUT_S)
