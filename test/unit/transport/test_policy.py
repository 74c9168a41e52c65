"""How a GPU waits for rows when nobody said so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_afd.transport.cuda_ipc import policy
from sglang_afd.transport.cuda_ipc.layout import WaitPolicy


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without GPUs and MPS; the test adds them."""
    gpus, pipes = tmp_path / "gpus", tmp_path / "pipe"
    gpus.mkdir()
    pipes.mkdir()
    monkeypatch.setattr(policy, "_GPUS", gpus)
    monkeypatch.setenv(policy.PIPE_VARIABLE, str(pipes))
    return tmp_path


def add_gpus(host: Path, number: int) -> None:
    for index in range(number):
        (host / "gpus" / f"0000:{index:02}:00.0").mkdir()


def start_mps(host: Path, pid: int) -> None:
    (host / "pipe" / "control").touch()
    (host / "pipe" / "nvidia-cuda-mps-control.pid").write_text(f"{pid}\n")


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [(0, WaitPolicy.POLL), (1, WaitPolicy.MEMOP), (2, WaitPolicy.POLL)],
)
def test_a_gpu_that_must_be_shared_in_turns_is_not_polled_from(
    host: Path, num_gpus: int, expected: WaitPolicy
) -> None:
    add_gpus(host, num_gpus)

    assert policy.choose_wait_policy("auto") is expected


def test_under_mps_a_shared_gpu_is_polled_from(host: Path) -> None:
    add_gpus(host, 1)
    start_mps(host, os.getpid())

    assert policy.choose_wait_policy("auto") is WaitPolicy.POLL


def test_what_a_daemon_left_behind_is_no_daemon(host: Path) -> None:
    add_gpus(host, 1)
    start_mps(host, 2**22 + 1)  # above the largest process id

    assert policy.choose_wait_policy("auto") is WaitPolicy.MEMOP


@pytest.mark.parametrize("asked", list(WaitPolicy))
def test_what_was_asked_for_is_done(host: Path, asked: WaitPolicy) -> None:
    add_gpus(host, 1)

    assert policy.choose_wait_policy(asked.value) is asked
