"""Servers on a GPU, as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import SUPPORT, Server, free_port

FLAGS = (
    *("--mem-fraction-static", "0.2", "--max-total-tokens", "8192", "--max-running-requests", "32"),
)
NO_GRAPHS = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")
# The import of SGLang alone takes 20 s a process, and the kernels of a fresh machine half a minute.
START_TIMEOUT_S = 240.0

Start = Callable[..., Server]


@contextmanager
def starter(directory: Path) -> Iterator[Start]:
    """Yields what starts one server in processes of its own; stopping them is the caller's."""
    processes: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "TRITON_F32_DEFAULT": "ieee",  # by default Triton multiplies float32 in TF32
    }

    def start(module: str, *argv: str) -> Server:
        port = free_port()
        log = directory / f"{module}-{port}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *argv, "--port", str(port)],
                stdout=output,
                stderr=output,
                env=environment,
                cwd=SUPPORT.parents[1],
                start_new_session=True,
            )
        processes.append(process)
        return Server(process.pid, port, log)

    yield start
    for process in processes:
        process.wait(10)
