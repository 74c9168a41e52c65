"""What the scheduler process knows of its MLP servers, readable outside the scheduler.

Shared memory with two pages: the writer fills the page that is not shown, then turns to it.
"""

from __future__ import annotations

import ctypes
import threading
from enum import StrEnum
from multiprocessing import get_context
from typing import Any

import msgspec

_PAGE_BYTES = 64 * 1024


class LinkState(StrEnum):
    """How the attention server stands with its MLP servers."""

    STARTING = "starting"  # never attached yet
    READY = "ready"  # attached to every rank
    DETACHED = "detached"  # was attached; trying again


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What `/afd/v1/status` shows of the scheduler process."""

    state: LinkState = LinkState.STARTING
    reason: str = ""  # why it is not ready, for people
    epoch: int = 0  # of the attachment in force; 0 without one
    ranks: tuple[dict[str, Any], ...] = ()  # rank, experts and boot id of each MLP server
    num_attaches: int = 0
    num_losses: int = 0
    num_failed_requests: int = 0  # aborted because the MLP servers were away
    weights: dict[str, int] = {}  # tensors read and skipped; msgspec copies the default


class StatusBoard:
    """One writer process, any number of readers; hand it to a child process as an argument."""

    def __init__(self) -> None:
        self._memory: Any = get_context("spawn").RawArray(ctypes.c_uint8, 2 * _PAGE_BYTES)
        self._shown: Any = get_context("spawn").RawValue(ctypes.c_int64, -1)
        self._status = Status()
        self._lock: threading.Lock | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None}

    def update(self, **changes: Any) -> Status:
        """Change some fields and show the result; called by any thread of the writer process."""
        if self._lock is None:
            self._lock = threading.Lock()
        with self._lock:
            self._status = msgspec.structs.replace(self._status, **changes)
            text = msgspec.json.encode(self._status)
            page = (self._shown.value + 1) % 2 if self._shown.value >= 0 else 0
            if len(text) + 4 > _PAGE_BYTES:
                raise AssertionError(f"status of {len(text)} bytes does not fit its page")
            start = page * _PAGE_BYTES
            view = memoryview(self._memory).cast("B")
            view[start : start + 4] = len(text).to_bytes(4, "little")
            view[start + 4 : start + 4 + len(text)] = text
            self._shown.value = page
            return self._status

    def read(self) -> Status:
        """The last status shown."""
        page = self._shown.value
        if page < 0:
            return Status()
        start = page * _PAGE_BYTES
        view = memoryview(self._memory).cast("B")
        length = int.from_bytes(view[start : start + 4], "little")
        return msgspec.json.decode(bytes(view[start + 4 : start + 4 + length]), type=Status)
