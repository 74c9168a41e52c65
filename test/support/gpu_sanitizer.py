"""Runs of compute-sanitizer, side by side: each takes half a minute, most of it to begin."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

SCRIPT = Path(__file__).parents[1] / "gpu" / "run_sanitizer.sh"
RUNS = (("memcheck",), ("racecheck",), ("memcheck", "--fault"))
TIMEOUT_S = 150.0


def is_installed() -> bool:
    """Is there a compute-sanitizer?"""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") is not None or usual.exists()


class Sanitizers:
    """All runs at once, from the beginning of a `with` block."""

    def __init__(self, directory: Path) -> None:
        self._outputs = {run: directory / f"{number}.log" for number, run in enumerate(RUNS)}
        self._processes: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Sanitizers:
        if is_installed():
            for run, output in self._outputs.items():
                with output.open("wb") as file:
                    self._processes[run] = subprocess.Popen(
                        [str(SCRIPT), *run],
                        env={**os.environ, "PYTHON": sys.executable},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
        return self

    def result(self, *run: str) -> tuple[int, str]:
        """The exit code of a run and what it printed, when it has ended."""
        self._processes[run].wait(TIMEOUT_S)
        return self._processes[run].returncode, self._outputs[run].read_text(errors="replace")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
