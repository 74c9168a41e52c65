"""Records one server's timeline: a call appends a tuple, and a thread writes them to the file.

The file is in Chrome's JSON array format, one event a line, whose closing bracket is optional: it
can be read however the server ended. `docs/timeline.md` names the events.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from typing import Any

import msgspec

from sglang_afd.trace import file
from sglang_afd.trace.header import HEADER_EVENT, Header

logger = logging.getLogger(__name__)

FLUSH_S = 0.25
CHUNK = 200  # events written at once, about 0.2 ms; in between the other threads get their turn
MAX_PENDING = 200_000  # events in memory, about 100 MB; more are dropped and counted
MAX_FILE_BYTES = 1 << 30  # recording stops there

_Pending = tuple[str, str, int, int, int, dict[str, Any]]  # ph, name, track, start, end, args


class Recorder:
    """Any thread may record; nothing waits for the disk.

    Args:
        path: As `file.open_for_writing` takes it.
        header: Whose timeline it is.
        max_pending: Events in memory.
        max_file_bytes: Size at which recording stops.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(
        self,
        path: str,
        header: Header,
        *,
        max_pending: int = MAX_PENDING,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._path = path
        self._descriptor = file.open_for_writing(path)
        self._header = header
        self._pid = os.getpid()
        self._max_pending = max_pending
        self._max_file_bytes = max_file_bytes
        self._num_bytes = 0
        self._num_dropped = 0
        self._is_stopped = False
        self._pending: deque[_Pending] = deque()
        self._should_end = threading.Event()
        self._flushing = threading.Lock()
        self._write(b"[\n" + self._encode("M", HEADER_EVENT, 0, args=_as_dict(header)))
        self.flush()
        self._thread = threading.Thread(target=self._run, name="afd-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def name_track(self, track: int, name: str) -> None:
        """Say what `track` shows; tracks are shown in the order of their numbers."""
        self._add(("M", "thread_name", track, 0, 0, {"name": name}))
        self._add(("M", "thread_sort_index", track, 0, 0, {"sort_index": track}))

    def span(self, name: str, track: int, start_ns: int, end_ns: int, **args: Any) -> None:
        """Something that took from `start_ns` to `end_ns` of the monotonic clock."""
        self._add(("X", name, track, start_ns, end_ns, args))

    def instant(self, name: str, track: int, at_ns: int, **args: Any) -> None:
        """Something that happened."""
        self._add(("i", name, track, at_ns, at_ns, args))

    def since_begin_us(self, at_ns: int) -> float:
        """A time as the file says it, for use in `args`."""
        return (at_ns - self._header.clock_ns) / 1000

    def flush(self) -> None:
        """Write what was recorded so far."""
        with self._flushing:
            remaining = len(self._pending)
            while remaining > 0 and not self._is_stopped:
                events = [self._pending.popleft() for _ in range(min(remaining, CHUNK))]
                self._write(b"".join(b",\n" + self._encode(*event) for event in events))
                remaining -= len(events)
            if self._num_dropped:
                dropped, self._num_dropped = self._num_dropped, 0
                now_ns = time.monotonic_ns()
                number = {"number": dropped}
                self._write(b",\n" + self._encode("i", "events dropped", 0, now_ns, now_ns, number))

    def close(self) -> None:
        """Write the rest and the closing bracket; idempotent, and only in the recording process."""
        if self._should_end.is_set() or os.getpid() != self._pid:
            return
        self._should_end.set()
        self._thread.join()
        self.flush()
        self._write(b"\n]\n")
        self._is_stopped = True
        os.close(self._descriptor)

    def _add(self, event: _Pending) -> None:
        if self._is_stopped:
            return
        if len(self._pending) >= self._max_pending:
            self._num_dropped += 1
            return
        self._pending.append(event)

    def _run(self) -> None:
        while not self._should_end.wait(FLUSH_S):
            self.flush()

    def _encode(
        self,
        ph: str,
        name: str,
        track: int,
        start_ns: int = 0,
        end_ns: int = 0,
        args: dict[str, Any] | None = None,
    ) -> bytes:
        event: dict[str, Any] = {"ph": ph, "name": name, "pid": self._pid, "tid": track}
        event["ts"] = 0 if ph == "M" else self.since_begin_us(start_ns)
        if ph == "X":
            event["dur"] = (end_ns - start_ns) / 1000
        if ph == "i":
            event["s"] = "t"
        event["args"] = args or {}
        return msgspec.json.encode(event)

    def _write(self, text: bytes) -> None:
        if self._is_stopped:
            return
        if self._num_bytes + len(text) > self._max_file_bytes:
            self._stop(f"it has reached {self._max_file_bytes} bytes")
            return
        try:
            while text:
                num_written = os.write(self._descriptor, text)
                self._num_bytes += num_written
                text = text[num_written:]
        except OSError as error:
            self._stop(str(error))

    def _stop(self, reason: str) -> None:
        self._is_stopped = True
        self._pending.clear()
        logger.warning("the timeline %s ends here: %s", self._path, reason)


def _as_dict(header: Header) -> dict[str, Any]:
    return {name: getattr(header, name) for name in header.__struct_fields__}
