"""The daemon's life, with a program that behaves as NVIDIA's control program does."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_afd.fleet import mps_keeper
from sglang_afd.fleet.mps import private_mps, running_daemon

WAIT_S = 20.0

USER = """
import sys
from sglang_afd.fleet.mps import private_mps

with private_mps() as mps:
    print(mps.environment["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    sys.stdin.read()
"""


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, f"still waiting after {WAIT_S} s"
        time.sleep(0.01)


def test_a_private_daemon_runs_inside_the_block_and_is_gone_after_it(control: Path) -> None:
    with private_mps(["GPU-1", "GPU-2"]) as mps:
        assert mps.environment is not None
        directory = Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"]).parent
        mode = stat.S_IMODE(directory.stat().st_mode)
        running = mps_keeper.running_in(directory)
        log = Path(mps.environment["CUDA_MPS_LOG_DIRECTORY"], "control.log").read_text()

    assert mode == 0o700
    assert len(running) == 1
    assert log == "visible GPU-1,GPU-2\n"
    assert mps_keeper.running_in(directory) == []
    assert not directory.exists()
    assert mps.is_private
    assert mps.problems == []


def test_an_error_inside_the_block_stops_the_daemon_too(control: Path) -> None:
    with pytest.raises(ZeroDivisionError), private_mps() as mps:
        assert mps.environment is not None
        directory = Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"]).parent
        raise ZeroDivisionError

    assert mps_keeper.running_in(directory) == []


def test_without_the_program_there_is_a_reason(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.unlink()
    monkeypatch.setenv("PATH", str(control.parent))

    with private_mps() as mps:
        pass

    assert mps.environment is None
    assert mps.reason == "nvidia-cuda-mps-control is not installed"


def test_a_daemon_that_does_not_start_says_why(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS", "refuses")

    with private_mps() as mps:
        pass

    assert mps.environment is None
    assert mps.reason.endswith("-d ended with 1: Cannot start: insufficient permission")


def test_a_daemon_that_does_not_quit_is_killed_and_that_is_told(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS", "deaf")
    monkeypatch.setattr(mps_keeper, "GONE_S", 0.2)
    directory = control.parent.parent / "daemon"
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(directory / "pipe"),
    }
    (directory / "pipe").mkdir(parents=True)
    subprocess.run([control, "-d"], env=os.environ | environment, check=True)
    assert len(mps_keeper.running_in(directory)) == 1

    problem = mps_keeper.stop(directory)

    assert problem.startswith("the MPS daemon did not stop when asked")
    wait_until(lambda: mps_keeper.running_in(directory) == [])  # a killed process has to end itself


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_daemon_outlives_a_program_that_is_killed(control: Path, number: int) -> None:
    user = subprocess.Popen(
        [sys.executable, "-c", USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert user.stdin is not None and user.stdout is not None
    directory = Path(user.stdout.readline().strip()).parent
    assert len(mps_keeper.running_in(directory)) == 1

    user.send_signal(number)
    user.wait(WAIT_S)

    wait_until(lambda: not directory.exists())
    assert mps_keeper.running_in(directory) == []
    user.stdin.close()
    user.stdout.close()


def test_a_daemon_that_the_user_runs_is_used_and_left_alone(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with private_mps() as theirs:
        assert theirs.environment is not None
        directory = theirs.environment["CUDA_MPS_PIPE_DIRECTORY"]
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", directory)

        with private_mps() as mps:
            pass

        assert not mps.is_private
        assert mps.environment == {"CUDA_MPS_PIPE_DIRECTORY": directory}
        assert running_daemon() == {"CUDA_MPS_PIPE_DIRECTORY": directory}
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")


def test_a_daemon_at_the_usual_place_is_found(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with private_mps() as theirs:
        assert theirs.environment is not None
        monkeypatch.setenv("FAKE_MPS_DEFAULT", theirs.environment["CUDA_MPS_PIPE_DIRECTORY"])

        found = running_daemon()

    assert found == {}
