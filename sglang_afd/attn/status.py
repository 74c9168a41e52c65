"""What the scheduler process knows of itself and its MLP servers, readable outside of it."""

from __future__ import annotations

import ctypes
import threading
from enum import StrEnum
from multiprocessing import get_context
from typing import Any

import msgspec

from sglang_afd.attn.load import LoadBoard
from sglang_afd.protocol.messages import MAX_MICRO_BATCHES
from sglang_afd.registrar.told import ToldPage
from sglang_afd.shared_page import SharedPage

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
    lost: tuple[str, ...] = ()  # boot ids of those that it had, while it has none
    stalled_since_s: float = 0.0  # time.monotonic() of the loss; read while STALLED only
    held_until_s: float = 0.0  # time.monotonic() from which on STALLED means DETACHED
    num_attaches: int = 0
    num_losses: int = 0
    num_retracted_requests: int = 0  # started over from their tokens, since a stall took too long
    num_failed_requests: int = 0  # ended because the MLP servers were away
    weights: dict[str, int] = {}  # tensors read and skipped; msgspec copies the default
    memory: dict[str, int] = {}  # what it holds on its GPU; empty on a CPU
    boot_id: str = ""  # of the scheduler process, by which MLP servers know it
    fingerprint: str = ""  # of the model; "" until it is loaded
    num_experts: int = 0  # of one layer
    max_running_requests: int = 0  # 0 until the scheduler is there
    kv_tokens: int = 0  # that its cache holds

    def at(self, now_s: float) -> Status:
        """This status at a time of `time.monotonic()`, which processes of one host share."""
        if self.state is LinkState.STALLED and now_s >= self.held_until_s:
            return msgspec.structs.replace(self, state=LinkState.DETACHED)
        return self


class StatusBoard:
    """One writer process, any number of readers; hand it to a child process as an argument."""

    def __init__(self) -> None:
        self._page = SharedPage(_PAGE_BYTES)
        # Steps that ran, by number of micro-batches; counted apart, since every step counts.
        self._steps: Any = get_context("spawn").RawArray(ctypes.c_int64, MAX_MICRO_BATCHES)
        self._status = Status()
        self._lock = threading.Lock()
        self.load = LoadBoard()
        self.told = ToldPage()  # the other way: written by the HTTP process

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
            self._page.write(msgspec.json.encode(self._status))
            return self._status

    def count_step(self, num_micro_batches: int) -> None:
        """One more step ran, in that many micro-batches; called by the scheduler's thread."""
        self._steps[num_micro_batches - 1] += 1

    def steps(self) -> dict[str, int]:
        """How many steps ran, by number of micro-batches."""
        return {str(index + 1): count for index, count in enumerate(self._steps)}

    def read(self) -> Status:
        """The last status shown."""
        text = self._page.read()
        return msgspec.json.decode(text, type=Status) if text else Status()
