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

from sglang_afd.mlp.peers import PeersPage
from sglang_afd.registrar.told import ToldPage
from sglang_afd.rounds.counters import RoundCounters


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
    ROUNDS = auto()
    BOARDED = auto()  # peers that boarded a round on its way
    PARKED = auto()  # peers that a round went on without
    WINDOWS = auto()  # rounds held back for a peer that was not there
    VAIN_WINDOWS = auto()  # of these, after which a peer was missing
    ONE_EXCHANGE_RUNS = auto()  # decode exchanges that were out of place in their peer's round
    PARKED_NOW = auto()
    WINDOW_NS = auto()
    PREFILL_AGE_NS = auto()  # time that prefill pieces waited
    MAX_PREFILL_AGE_NS = auto()
    WAIT_NS = auto()  # nothing to do
    RUN_NS = auto()  # experts
    REPLY_NS = auto()  # sending partial sums
    LAUNCHES = auto()  # units that were enqueued on a GPU
    LAUNCH_NS = auto()  # the host's work for them, from asking what comes next
    GRAPH_RUNS = auto()  # of these, launched as a graph
    EAGER_RUNS = auto()  # the others
    IN_FLIGHT = auto()  # enqueued and not done, now


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
        self.peers = PeersPage()
        self.told = ToldPage()  # the other way: written by the HTTP process

    @property
    def words(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """All words; keep the view where it is used often."""
        return np.frombuffer(self._memory, dtype=np.int64)

    @property
    def cells(self) -> memoryview:
        """The same words, for whoever changes single ones often; keep the view."""
        return memoryview(self._memory).cast("B").cast("q")

    def show_rounds(self, counters: RoundCounters) -> None:
        """Copy what the rounds counted."""
        words = self.words
        words[Counter.ROUNDS] = counters.rounds
        words[Counter.BOARDED] = counters.merged
        words[Counter.PARKED] = counters.split
        words[Counter.WINDOWS] = counters.windows
        words[Counter.VAIN_WINDOWS] = counters.vain_windows
        words[Counter.ONE_EXCHANGE_RUNS] = counters.one_exchange_runs
        words[Counter.PARKED_NOW] = counters.parked_peers
        words[Counter.WINDOW_NS] = round(counters.window_s * 1e9)
        words[Counter.PREFILL_AGE_NS] = round(counters.prefill_age_s * 1e9)
        words[Counter.MAX_PREFILL_AGE_NS] = round(counters.max_prefill_age_s * 1e9)

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
