"""Ends a private MPS daemon when its user is gone; a program of its own, see mps.py.

Standard input ends when whoever started the daemon closes it, or is killed. Takes the directory
that is the daemon's, prints what went wrong, and removes the directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PROCESS_NAME = b"nvidia-cuda-mps"  # of the daemon and of the servers that it starts
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
CLIENTS_S = 5  # for clients that are still there to end, before the daemon ends them
QUIT_S = 20.0
GONE_S = 5.0
POLL_S = 0.05


def main(directory: Path) -> int:
    """Wait for the end of standard input, then stop what runs in `directory`."""
    sys.stdin.read()
    problem = stop(directory)
    shutil.rmtree(directory, ignore_errors=True)
    if problem:
        print(problem)  # noqa: T201 - read by mps.py
    return 1 if problem else 0


def pipe_directory(directory: Path) -> Path:
    """Where the daemon of `directory` has its sockets."""
    return directory / "pipe"


def stop(directory: Path) -> str:
    """Have the daemon quit, and see it gone; returns why it had to be killed, if it had to."""
    pipe = pipe_directory(directory)
    if not running_in(directory) and not (pipe.is_dir() and any(pipe.iterdir())):
        return ""  # none was started
    problem = _quit(directory)
    if _wait_gone(directory):
        return ""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running_in(directory):
            _send(pid, number)
        if _wait_gone(directory):
            break
    return f"the MPS daemon did not stop when asked ({problem or 'no answer'}); it was killed"


def running_in(directory: Path) -> list[int]:
    """The daemon of `directory` and its servers; their clients are told by their names."""
    entry = f"{PIPE_VARIABLE}={pipe_directory(directory)}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()  # empty once it has ended
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if entry in environment and _is_program(command.split(b"\0")):
            found.append(int(process.name))
    return found


def _is_program(words: list[bytes]) -> bool:
    names = [word.rpartition(b"/")[2] for word in words[:3]]  # an interpreter may come first
    return any(name.startswith(PROCESS_NAME) for name in names)


def _quit(directory: Path) -> str:
    environment = os.environ | {PIPE_VARIABLE: str(pipe_directory(directory))}
    try:
        result = subprocess.run(
            [CONTROL],
            input=f"quit -t {CLIENTS_S}\n",
            env=environment,
            capture_output=True,
            text=True,
            timeout=QUIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (result.stdout + result.stderr).strip()


def _wait_gone(directory: Path) -> bool:
    deadline_s = time.monotonic() + GONE_S
    while running_in(directory):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
