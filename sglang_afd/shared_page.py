"""Bytes that one process shows and others read, in shared memory without a lock.

Two pages: the writer fills the one that is not shown, then turns to it. A reader reads again when
the page was turned meanwhile.
"""

from __future__ import annotations

import ctypes
from multiprocessing import get_context
from typing import Any


class SharedPage:
    """One writer at a time, any number of readers; hand it to a child process as an argument.

    Args:
        num_bytes: That fit.
    """

    def __init__(self, num_bytes: int) -> None:
        self._page_bytes = num_bytes + 4
        self._memory: Any = get_context("spawn").RawArray(ctypes.c_uint8, 2 * self._page_bytes)
        # Counts the writes; its parity is the page shown.
        self._turn: Any = get_context("spawn").RawValue(ctypes.c_int64, -1)

    def write(self, text: bytes) -> None:
        """Show `text` instead of what was there."""
        if len(text) + 4 > self._page_bytes:
            raise AssertionError(f"{len(text)} bytes do not fit a page of {self._page_bytes - 4}")
        turn = self._turn.value + 1
        start = turn % 2 * self._page_bytes
        view = memoryview(self._memory).cast("B")
        view[start : start + 4] = len(text).to_bytes(4, "little")
        view[start + 4 : start + 4 + len(text)] = text
        self._turn.value = turn

    def read(self) -> bytes:
        """What was written last; nothing before the first time."""
        view = memoryview(self._memory).cast("B")
        while (turn := self._turn.value) >= 0:
            start = turn % 2 * self._page_bytes
            length = int.from_bytes(view[start : start + 4], "little")
            text = bytes(view[start + 4 : start + 4 + length])
            if self._turn.value == turn:
                return text
        return b""
