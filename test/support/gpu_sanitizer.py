"""Runs of compute-sanitizer, side by side: each takes half a minute, most of it to begin."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

SCRIPT = Path(__file__).parents[1] / "gpu" / "run_sanitizer.sh"
RUNS = (
    ("memcheck",),
    ("racecheck",),
    ("memcheck", "--fault", "read"),
    ("racecheck", "--fault", "race"),
)
TIMEOUT_S = 170.0  # of all runs together; the program says before where it stands


def find_tool() -> str | None:
    """Where compute-sanitizer is: on the path, beside nvcc, or where CUDA usually is."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    places += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    found = [shutil.which("compute-sanitizer")]
    found += [shutil.which("compute-sanitizer", path=f"{place}/bin") for place in places if place]
    return next((tool for tool in found if tool), None)


class Sanitizers:
    """All runs at once, from the beginning of a `with` block."""

    def __init__(self, directory: Path, tool: str | None) -> None:
        self._outputs = {run: directory / f"{'-'.join(run)}.log" for run in RUNS}
        self._processes: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}
        self._tool = tool
        self._deadline_s = time.monotonic() + TIMEOUT_S

    def __enter__(self) -> Sanitizers:
        if self._tool is not None:
            environment = {"PYTHON": sys.executable, "COMPUTE_SANITIZER": self._tool}
            for run, output in self._outputs.items():
                with output.open("wb") as file:
                    self._processes[run] = subprocess.Popen(
                        [str(SCRIPT), *run],
                        env={**os.environ, **environment},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
        return self

    def result(self, *run: str) -> tuple[int, str]:
        """The exit code of a run and what it printed, when it has ended or its time is over."""
        process = self._processes[run]
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, self._deadline_s - time.monotonic()))
        _end(process)
        return process.returncode, self._outputs[run].read_text(errors="replace")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started, which may live on."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
