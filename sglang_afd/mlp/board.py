"""Counters that the loop writes and the HTTP process reads, in shared memory without a lock.

One process writes, word by word; a reader may see one counter a unit ahead of another.
"""

from __future__ import annotations

import ctypes
import time
from enum import IntEnum, auto
from multiprocessing import get_context
from typing import Any

import numpy as np


class Counter(IntEnum):
    """One word each; `_ns` are nanoseconds since the start of the loop."""

    TURNED_AT_NS = 0  # time.monotonic_ns() of the last turn of the loop
    STATE = auto()  # a State
    PEERS = auto()  # attention servers attached now
    WAITING = auto()  # exchanges that have arrived and not run
    EXCHANGES = auto()  # served
    FAILED = auto()  # declined because the experts raised
    REFUSED = auto()  # messages declined by the protocol
    ATTACHES = auto()
    LOST_PEERS = auto()
    RUNS = auto()  # expert runs
    DECODE_RUNS = auto()
    DECODE_RUN_PEERS = auto()  # peers of all decode runs
    PREFILL_PIECES = auto()
    ROWS = auto()  # rows of all runs
    DECODE_ROWS = auto()
    PREFILL_ROWS = auto()
    WAIT_NS = auto()  # nothing to do
    RUN_NS = auto()  # experts
    REPLY_NS = auto()  # sending partial sums


class State(IntEnum):
    """Where the loop is in its life."""

    LOADING = 0
    SERVING = 1
    STOPPING = 2


class Board:
    """`len(Counter)` words, then one word for each local expert."""

    def __init__(self, num_local_experts: int) -> None:
        self.num_local_experts = num_local_experts
        self._memory: Any = get_context("spawn").RawArray(
            ctypes.c_int64, len(Counter) + num_local_experts
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"num_local_experts": self.num_local_experts, "_memory": self._memory}

    @property
    def words(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """All words; keep the view where it is used often."""
        return np.frombuffer(self._memory, dtype=np.int64)

    def read(self) -> dict[Counter, int]:
        """Every counter now."""
        words = self.words
        return {counter: int(words[counter]) for counter in Counter}

    def rows_per_expert(self) -> list[int]:
        """Choices routed to each local expert, over all layers."""
        return [int(count) for count in self.words[len(Counter) :]]

    def age_s(self) -> float:
        """Seconds since the loop last turned."""
        return (time.monotonic_ns() - int(self.words[Counter.TURNED_AT_NS])) / 1e9
