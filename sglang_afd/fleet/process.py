"""One server process: its group, its output, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO

from sglang_afd.fleet.spec import ServerSpec

POLL_S = 0.1
TAIL_LINES = 20
READ_BYTES = 1 << 16


class ServerProcess:
    """A server in a session and process group of its own, out of reach of the terminal's Ctrl-C.

    Args:
        spec: What to start.
        on_line: Called with each line that the server or one of its own children prints.
    """

    def __init__(self, spec: ServerSpec, on_line: Callable[[str], None]) -> None:
        self.name = spec.name
        self.stop_stage = spec.stop_stage
        self.has_spares = spec.has_spares
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._stop_signal = spec.stop_signal
        self._popen = subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | spec.environment,
            start_new_session=True,
        )
        self._on_line = on_line
        self._reading = asyncio.create_task(self._read())

    @property
    def process_group(self) -> int:
        """Number of the group that the server and everything it starts belong to."""
        return self._popen.pid

    async def wait(self) -> int:
        """The exit code, negative for a signal; ends with the server, not with its children."""
        while (code := self._popen.poll()) is None:
            await asyncio.sleep(POLL_S)
        return code

    async def drain_output(self, timeout_s: float) -> None:
        """Wait until its last line is read; a child of it may keep the pipe open for longer."""
        await asyncio.wait([self._reading], timeout=timeout_s)

    def terminate(self) -> None:
        """Ask the server to end; it stops its own children."""
        self._popen.send_signal(self._stop_signal)

    async def kill_group(self, timeout_s: float) -> None:
        """End whatever is left of the group, and see it gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process_group, signal.SIGKILL)
        deadline = time.monotonic() + timeout_s
        while _is_running(self.process_group) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S / 10)
        await self.drain_output(POLL_S)
        self._reading.cancel()

    async def _read(self) -> None:
        assert self._popen.stdout is not None, "the server's output is a pipe"
        async for line in _lines(self._popen.stdout):
            self.tail.append(line)
            self._on_line(line)


async def _lines(pipe: IO[bytes]) -> AsyncIterator[str]:
    """Lines of a pipe; a carriage return ends one too, since that is how progress bars write."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    pending = b""
    try:
        while chunk := await reader.read(READ_BYTES):
            *lines, pending = re.split(rb"[\r\n]+", pending + chunk)
            for line in filter(bytes.strip, lines):
                yield line.decode(errors="replace")
        if pending.strip():
            yield pending.decode(errors="replace")
    finally:
        transport.close()


def _is_running(process_group: int) -> bool:
    """Whether the group has a process that is more than an entry nobody has collected yet."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # Fields after the name, which may hold anything: state, parent, group.
            state, _, group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(group) == process_group and state not in "ZX":
                return True
    return False
