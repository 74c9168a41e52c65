"""Numbers that all relay processes and the control process see at once: cells of shared memory.

Every cell has one writer, the relay process whose block it lies in, so nobody needs a lock. The one
exception are the turns: when two relays take one at once, two requests take the same.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from operator import add

MAX_SERVERS = 1024
# Upper edges in seconds; the last bucket has none.
FIRST_BYTE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

CELLS = (
    "connections",  # open connections of clients
    "running",  # requests let in and not yet answered in full
    "queued",  # requests that wait to be let in
    "held",  # requests that wait for a ready server
    "requests",  # request heads that were read, good or bad
    "replayed",  # requests sent again, to another server
    "aborted",  # requests whose client left before the end of the answer
    "broken",  # answers that ended in the middle because their server broke off
    "request_bytes",  # of bodies
    "response_bytes",  # of bodies
    "chunks",  # pieces of answers, one for each read
    "first_byte_us",  # time from a request's head to the first byte of its answer, summed
    "holds",  # requests that had to wait for a ready server
)
CONNECTIONS, RUNNING, QUEUED, HELD, REQUESTS, REPLAYED, ABORTED, BROKEN = range(8)
REQUEST_BYTES, RESPONSE_BYTES, CHUNKS, FIRST_BYTE_US, HOLDS = range(8, 13)
GAUGES = (CONNECTIONS, RUNNING, QUEUED, HELD)
FIRST_BYTE_BUCKET = len(CELLS)
STATUS = FIRST_BYTE_BUCKET + len(FIRST_BYTE_BUCKETS_S) + 1  # STATUS + 404 counts 404s
IN_FLIGHT = STATUS + 1000  # and the next ones by slot
SERVED = IN_FLIGHT + MAX_SERVERS
FAILED = SERVED + MAX_SERVERS
# Of answers in server-sent events: from when the server had the whole request to their first byte.
TTFT_SUM_US = FAILED + MAX_SERVERS
TTFT_COUNT = TTFT_SUM_US + MAX_SERVERS
BLOCK = TTFT_COUNT + MAX_SERVERS
TURN = 0  # the number of choices
TURNS = 8  # and the next ones by slot: which choice was its last
HEADER = TURNS + MAX_SERVERS
CELL_BYTES = 8


class SharedCounters:
    """All blocks, as everybody may read them.

    Args:
        descriptor: An open file of `size_of(num_relays)` bytes; `create` makes one.
    """

    def __init__(self, descriptor: int, num_relays: int) -> None:
        self.num_relays = num_relays
        self.descriptor = descriptor
        self.cells = memoryview(mmap.mmap(descriptor, size_of(num_relays))).cast("q")
        self.turns = self.cells[TURNS : TURNS + MAX_SERVERS]  # who has the smallest is next
        self._blocks = [HEADER + relay * BLOCK for relay in range(num_relays)]

    @classmethod
    def create(cls, num_relays: int) -> SharedCounters:
        descriptor = os.memfd_create("sgl-router-afd")
        os.ftruncate(descriptor, size_of(num_relays))
        return cls(descriptor, num_relays)

    def take_turn(self, slot: int) -> None:
        """This server was chosen; all others come before it now."""
        turn = self.cells[TURN] + 1
        self.cells[TURN] = self.turns[slot] = turn

    def total(self, cell: int) -> int:
        """The sum over all relays."""
        cells = self.cells
        total = 0
        for block in self._blocks:
            total += cells[block + cell]
        return total

    def totals(self, first: int, num: int) -> list[int]:
        """The sums of `num` neighbouring cells."""
        start, *others = self._blocks
        sums = self.cells[start + first : start + first + num].tolist()
        for block in others:
            row = self.cells[block + first : block + first + num].tolist()
            sums = list(map(add, sums, row))
        return sums

    def forget_running(self, relay: int) -> None:
        """A relay died: nothing is in flight there any more; what it has counted stays."""
        block = self._blocks[relay]
        for cell in (*GAUGES, *range(IN_FLIGHT, IN_FLIGHT + MAX_SERVERS)):
            self.cells[block + cell] = 0


class RelayCounters:
    """One relay's own block, which it alone writes."""

    def __init__(self, shared: SharedCounters, relay: int) -> None:
        self.shared = shared
        self._cells = shared.cells
        self._block = HEADER + relay * BLOCK

    def add(self, cell: int, amount: int = 1) -> None:
        self._cells[self._block + cell] += amount

    def add_chunk(self, num_bytes: int) -> None:
        """A piece of an answer; the most frequent of all calls."""
        cells, block = self._cells, self._block
        cells[block + CHUNKS] += 1
        cells[block + RESPONSE_BYTES] += num_bytes

    def add_first_byte(self, seconds: float) -> None:
        self.add(FIRST_BYTE_US, int(seconds * 1e6))
        self.add(FIRST_BYTE_BUCKET + bisect_left(FIRST_BYTE_BUCKETS_S, seconds))

    def add_first_token(self, slot: int, seconds: float) -> None:
        """A server streams its first event."""
        self.add(TTFT_SUM_US + slot, int(seconds * 1e6))
        self.add(TTFT_COUNT + slot)


def size_of(num_relays: int) -> int:
    return (HEADER + num_relays * BLOCK) * CELL_BYTES
