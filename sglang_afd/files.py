"""Files that a person named, which may be anything, and streams whose reader is gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TextIO

MAX_BYTES = 1 << 28  # of settings, profiles and lists, which are a thousand times smaller


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """All bytes of a file. A pipe that nobody writes to is empty, instead of waited for.

    Raises: OSError, also for a file of more than `max_bytes`.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        os.set_blocking(file.fileno(), True)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes >> 20} MiB", str(path))
    return content


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting until somebody opens the other end of a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def send_nowhere(stream: TextIO) -> None:
    """Lose what a stream still holds and what comes: it would fail again when it closes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)
