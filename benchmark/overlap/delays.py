"""One server's delays and what it counts of them, in a file that both sides map into memory.

The benchmark writes the two delays while nothing runs; the server alone writes the counts.
"""

from __future__ import annotations

import mmap
import time
from enum import IntEnum, auto
from pathlib import Path

ENV = "BENCH_OVERLAP_DELAYS"  # path of the file; read by the planted code, never by the product


class Word(IntEnum):
    """One int64 each."""

    PER_CALL_NS = 0  # slept before each exchange or expert run
    PER_ROW_NS = auto()  # and for each of its rows
    CALLS = auto()  # exchanges sent, or expert runs
    ROWS = auto()  # of all calls
    DECODE_STEPS = auto()  # attention only, as are those below
    DECODE_CALLS = auto()
    DECODE_ROWS = auto()
    ASKED_NS = auto()  # what all sleeps should have taken
    SLEPT_NS = auto()  # what they took


class DelayFile:
    """A view of the file; creates it if need be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        num_bytes = 8 * len(Word)
        with path.open("a+b") as file:
            file.truncate(num_bytes)
            self._words = memoryview(mmap.mmap(file.fileno(), num_bytes)).cast("q")

    def set(self, *, per_call_ms: float = 0.0, per_row_ms: float = 0.0) -> None:
        """Delays from the next call on."""
        self._words[Word.PER_CALL_NS] = round(per_call_ms * 1e6)
        self._words[Word.PER_ROW_NS] = round(per_row_ms * 1e6)

    def read(self) -> dict[Word, int]:
        """Everything now."""
        return {word: self._words[word] for word in Word}

    def add(self, word: Word, amount: int) -> None:
        """Count; for the server."""
        self._words[word] += amount

    def sleep(self, num_rows: int) -> None:
        """Count one call with so many rows and sleep as long as it is to take; for the server."""
        words = self._words
        words[Word.CALLS] += 1
        words[Word.ROWS] += num_rows
        asked_ns = words[Word.PER_CALL_NS] + words[Word.PER_ROW_NS] * num_rows
        if asked_ns:
            started_ns = time.monotonic_ns()
            time.sleep(asked_ns / 1e9)
            words[Word.ASKED_NS] += asked_ns
            words[Word.SLEPT_NS] += time.monotonic_ns() - started_ns
