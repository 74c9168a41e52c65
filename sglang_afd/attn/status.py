"""What the scheduler process knows of its MLP servers, readable outside the scheduler.

Shared memory with two pages: the writer fills the page that is not shown, then turns to it. A
reader reads again when the page was turned meanwhile.
"""

from __future__ import annotations

import ctypes
import threading
from enum import StrEnum
from multiprocessing import get_context
from typing import Any

import msgspec

from sglang_afd.protocol.messages import MAX_MICRO_BATCHES

_PAGE_BYTES = 64 * 1024
_MAX_REASON = 2000  # characters; a reason may quote what a peer sent


class LinkState(StrEnum):
    """How the attention server stands with its MLP servers."""

    STARTING = "starting"  # never attached yet
    READY = "ready"  # attached to every rank
    STALLED = "stalled"  # lost them; trying again, and requests are held meanwhile
    DETACHED = "detached"  # lost them for too long; trying again, and requests get 503


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What `/afd/v1/status` shows of the scheduler process."""

    state: LinkState = LinkState.STARTING
    reason: str = ""  # why it is not ready, for people
    epoch: int = 0  # of the attachment in force; 0 without one
    ranks: tuple[dict[str, Any], ...] = ()  # rank, experts and boot id of each MLP server
    stalled_since_s: float = 0.0  # time.monotonic() of the loss; read while STALLED only
    held_until_s: float = 0.0  # time.monotonic() from which on STALLED means DETACHED
    num_attaches: int = 0
    num_losses: int = 0
    num_retracted_requests: int = 0  # started over from their tokens, since a stall took too long
    num_failed_requests: int = 0  # ended because the MLP servers were away
    weights: dict[str, int] = {}  # tensors read and skipped; msgspec copies the default
    memory: dict[str, int] = {}  # what it holds on its GPU; empty on a CPU

    def at(self, now_s: float) -> Status:
        """This status at a time of `time.monotonic()`, which processes of one host share."""
        if self.state is LinkState.STALLED and now_s >= self.held_until_s:
            return msgspec.structs.replace(self, state=LinkState.DETACHED)
        return self


class StatusBoard:
    """One writer process, any number of readers; hand it to a child process as an argument."""

    def __init__(self) -> None:
        self._memory: Any = get_context("spawn").RawArray(ctypes.c_uint8, 2 * _PAGE_BYTES)
        # Counts the updates; its parity is the page shown.
        self._turn: Any = get_context("spawn").RawValue(ctypes.c_int64, -1)
        # Steps that ran, by number of micro-batches; counted apart, since every step counts.
        self._steps: Any = get_context("spawn").RawArray(ctypes.c_int64, MAX_MICRO_BATCHES)
        self._status = Status()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def update(self, **changes: Any) -> Status:
        """Change some fields and show the result; called by any thread of the writer process."""
        if "reason" in changes:
            changes["reason"] = changes["reason"][:_MAX_REASON]
        with self._lock:
            self._status = msgspec.structs.replace(self._status, **changes)
            text = msgspec.json.encode(self._status)
            turn = self._turn.value + 1
            if len(text) + 4 > _PAGE_BYTES:
                raise AssertionError(f"status of {len(text)} bytes does not fit its page")
            start = turn % 2 * _PAGE_BYTES
            view = memoryview(self._memory).cast("B")
            view[start : start + 4] = len(text).to_bytes(4, "little")
            view[start + 4 : start + 4 + len(text)] = text
            self._turn.value = turn
            return self._status

    def count_step(self, num_micro_batches: int) -> None:
        """One more step ran, in that many micro-batches; called by the scheduler's thread."""
        self._steps[num_micro_batches - 1] += 1

    def steps(self) -> dict[str, int]:
        """How many steps ran, by number of micro-batches."""
        return {str(index + 1): count for index, count in enumerate(self._steps)}

    def read(self) -> Status:
        """The last status shown."""
        view = memoryview(self._memory).cast("B")
        while (turn := self._turn.value) >= 0:
            start = turn % 2 * _PAGE_BYTES
            length = int.from_bytes(view[start : start + 4], "little")
            text = bytes(view[start + 4 : start + 4 + length])
            if self._turn.value == turn:
                return msgspec.json.decode(text, type=Status)
        return Status()
