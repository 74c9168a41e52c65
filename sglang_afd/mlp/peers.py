"""Which attention servers an MLP server hears, shown by the loop's process to the HTTP process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_afd.config import MAX_PEERS
from sglang_afd.shared_page import SharedPage

LOST_S = 30.0  # a loss is told for so long, or until that process attaches again
_MAX_LOST = 64
_MAX_REASON = 300  # characters
_PAGE_BYTES = 128 * MAX_PEERS + 2048 * _MAX_LOST


class LostPeer(msgspec.Struct, frozen=True, array_like=True):
    """One attention server whose connection broke."""

    boot_id: str
    reason: str
    at_s: float  # time.monotonic(), which processes of one host share


class Peers(msgspec.Struct, frozen=True):
    """All of them, by boot id."""

    attached: tuple[str, ...] = ()
    lost: tuple[LostPeer, ...] = ()


class PeersPage:
    """Written by the loop's thread, read by the HTTP process.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._page = SharedPage(_PAGE_BYTES)
        self._clock = clock
        self._attached: dict[bytes, str] = {}
        self._lost: dict[str, LostPeer] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_page": self._page, "_attached": {}, "_lost": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _clock=time.monotonic)  # that of the process which reads

    def attached(self, peer: bytes, boot_id: str) -> None:
        """A peer passed the handshake."""
        self._attached[peer] = boot_id
        self._lost.pop(boot_id, None)
        self._show()

    def gone(self, peer: bytes, boot_id: str, *, reason: str) -> None:
        """A peer is there no more; an empty reason is an orderly goodbye."""
        self._attached.pop(peer, None)
        if reason and boot_id not in self._attached.values():
            lost = LostPeer(boot_id, reason[:_MAX_REASON], self._clock())
            self._lost[boot_id] = lost
            while len(self._lost) > _MAX_LOST:
                del self._lost[next(iter(self._lost))]
        self._show()

    def read(self) -> Peers:
        """Those now, and those lost of late."""
        text = self._page.read()
        if not text:
            return Peers()
        peers = msgspec.json.decode(text, type=Peers)
        since_s = self._clock() - LOST_S
        lost = tuple(one for one in peers.lost if one.at_s >= since_s)
        return msgspec.structs.replace(peers, lost=lost)

    def _show(self) -> None:
        peers = Peers(attached=tuple(self._attached.values()), lost=tuple(self._lost.values()))
        self._page.write(msgspec.json.encode(peers))
