"""NVIDIA's Multi-Process Service (MPS): lets kernels of several processes run on a GPU at once.

Without it processes take turns in time slices of milliseconds, and a kernel that waits for another
process waits for its turn as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sglang_afd.fleet import mps_keeper
from sglang_afd.fleet.mps_keeper import CONTROL, PIPE_VARIABLE, pipe_directory

LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
NOWHERE = {PIPE_VARIABLE: "/dev/null"}  # a CUDA program with it looks for no daemon
START_S = 30.0
ANSWER_S = 10.0
STOP_S = 60.0
MAX_PATH_BYTES = 80  # of the pipe directory: its sockets' paths may have 107


@dataclass(frozen=True, kw_only=True)
class Mps:
    """Whether CUDA programs can share a GPU through MPS, and how."""

    environment: Mapping[str, str] | None  # what they need; None without MPS
    reason: str = ""  # why there is none
    directory: Path | None = None  # of the daemon that was started here
    is_private: bool = True  # started here, and stopped here
    problems: list[str] = field(default_factory=list)  # filled as the `with` block ends


@contextmanager
def private_mps(gpu_ids: Sequence[str] = ()) -> Iterator[Mps]:
    """A daemon of our own for as long as the `with` block runs, or until this process is killed.

    A daemon that the user runs already is used as it is and left alone. No GPU setting is changed.

    Args:
        gpu_ids: UUIDs of the GPUs that it is for; all by default. Clients must name theirs by UUID,
            too: the daemon counts the indices of its clients within its own list.

    Returns: Environment for the programs that share a GPU, or None and the reason.
    """
    theirs = running_daemon()
    if theirs is not None:
        yield Mps(environment=theirs, is_private=False)
        return
    root = tempfile.gettempdir()
    directory = Path(tempfile.mkdtemp(prefix="sglang-afd-mps-", dir=_short(root)))  # mode 0700
    keeper = _Keeper(directory)
    mps: Mps | None = None
    try:
        mps = _start(directory, gpu_ids)
        yield mps
    finally:
        problem = keeper.stop()
        if problem and mps is not None:
            mps.problems.append(problem)


def running_daemon() -> Mapping[str, str] | None:
    """Environment of the daemon that CUDA programs of this environment find anyway; None: none."""
    directory = os.environ.get(PIPE_VARIABLE)
    return ({PIPE_VARIABLE: directory} if directory else {}) if _answers({}) else None


class _Keeper:
    """The program that stops the daemon, whichever way this one ends."""

    def __init__(self, directory: Path) -> None:
        # A session of its own keeps it out of reach of the terminal's Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", mps_keeper.__file__, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def stop(self) -> str:
        """Have it stop the daemon now; returns what went wrong."""
        try:
            said, _ = self._process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            return f"the MPS daemon was not stopped within {STOP_S:g} s; see `pgrep {CONTROL}`"
        return said.strip()


def _start(directory: Path, gpu_ids: Sequence[str]) -> Mps:
    log = directory / "log"
    environment = {PIPE_VARIABLE: str(pipe_directory(directory)), LOG_VARIABLE: str(log)}
    pipe_directory(directory).mkdir()
    log.mkdir()
    if len(os.fsencode(pipe_directory(directory))) > MAX_PATH_BYTES:
        return Mps(environment=None, reason=f"{directory} is too long for its sockets; set TMPDIR")
    # NOTE: indices would be counted twice, by the daemon and by its clients.
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)} if gpu_ids else {}
    base = {name: value for name, value in os.environ.items() if name != SHARE_VARIABLE}
    output = directory / "output"
    try:
        with output.open("w") as file:  # a pipe would stay open in the daemon
            code = subprocess.run(
                [CONTROL, "-d"],
                env=base | environment | visible,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                timeout=START_S,
                check=False,
            ).returncode
    except FileNotFoundError:
        return Mps(environment=None, reason=f"{CONTROL} is not installed")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Mps(environment=None, reason=f"{CONTROL} -d: {error}")
    if code != 0:
        said = " ".join(output.read_text(errors="replace").split()) or "it says nothing"
        return Mps(environment=None, reason=f"{CONTROL} -d ended with {code}: {said}")
    if not _answers(environment):
        return Mps(environment=None, reason=f"{CONTROL} -d started, and does not answer")
    return Mps(environment=environment, directory=directory)


def _answers(environment: Mapping[str, str]) -> bool:
    try:
        result = subprocess.run(
            [CONTROL],
            input="get_default_active_thread_percentage\n",
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
        float(result.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return False
    return result.returncode == 0


def _short(root: str) -> str:
    return root if len(os.fsencode(root)) <= MAX_PATH_BYTES // 2 else "/tmp"
