"""What the host tells kernels of each unit, and hears back, in memory that both reach."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

RING_UNITS = 64  # descriptors that may be submitted and not yet done
HEADER_WORDS = 8  # of struct Unit and of struct Plan in exchange.cu
MEMBER_WORDS = 4
ERROR_AT = 32  # among the words that are told
TOLD_WORDS = 64  # units done, then the error
_HEADER = struct.Struct(f"<{HEADER_WORDS}I")
_MEMBER = struct.Struct(f"<{MEMBER_WORDS}I")
_EVERY_ROW = 0xFFFFFFFF
_ERRORS = {
    1: "attention server {peer} has rows for layer {got_layer}, expected those for layer {layer}",
    2: "attention server {peer} has {rows} rows for layer {layer}, not those that it announced",
}


class UnitMemberRef(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One exchange of a unit, as kernels find it."""

    peer_index: int
    slot: int
    num_rows: int


class KnowsSequence(Protocol):
    """What is needed of `PeerTable`."""

    def seq_of_next(self, index: int, slot: int, *, is_served: bool) -> int:
        """See `PeerTable`."""


class UnitRing:
    """Descriptors of units in a ring, and how far kernels have come.

    Args:
        table: The peers.
        layers: Index of each layer in `expert_counts`.
        words: The ring, [RING_UNITS, HEADER_WORDS + members * MEMBER_WORDS].
        told: TOLD_WORDS that kernels write.
    """

    def __init__(
        self,
        table: KnowsSequence,
        layers: Mapping[int, int],
        words: npt.NDArray[np.uint32],
        told: npt.NDArray[np.uint32],
    ) -> None:
        self._table = table
        self._layers = layers
        self._descriptors = words.data.cast("B")
        self._unit_bytes = words.shape[1] * 4
        self._told_words = told.data
        self._num_submitted = 0

    def submit(
        self,
        layer_id: int,
        members: Sequence[UnitMemberRef],
        *,
        first_row: int = 0,
        num_rows: int | None = None,
        is_last_piece: bool = True,
    ) -> int:
        """Describe the unit that is launched next; on the stream that it will run in.

        Args:
            layer_id: Of every member.
            members: Whose rows run together, at most max_peers of them.
            first_row: Where the piece of the only member begins.
            num_rows: Of that piece; None takes all rows.
            is_last_piece: The members' replies are whole after it.

        Returns: Its ticket, 1 for the first.
        """
        if self._num_submitted - self.num_done >= RING_UNITS:
            raise AssertionError(f"{RING_UNITS} units are in flight; wait for one before the next")
        start = self._num_submitted % RING_UNITS * self._unit_bytes
        place = start + _HEADER.size
        if place + len(members) * _MEMBER.size > start + self._unit_bytes:
            raise AssertionError(f"{len(members)} members; a descriptor has no room for so many")
        self._num_submitted += 1
        for member in members:
            _MEMBER.pack_into(
                self._descriptors,
                place,
                member.peer_index,
                member.slot,
                member.num_rows,
                self._table.seq_of_next(member.peer_index, member.slot, is_served=is_last_piece),
            )
            place += _MEMBER.size
        _HEADER.pack_into(
            self._descriptors,
            start,
            self._num_submitted & 0xFFFFFFFF,
            self._layers[layer_id],
            layer_id,
            len(members),
            first_row,
            _EVERY_ROW if num_rows is None else num_rows,
            0,
            0,
        )
        return self._num_submitted

    @property
    def num_submitted(self) -> int:
        """Units described so far; the last one's ticket."""
        return self._num_submitted

    @property
    def num_done(self) -> int:
        """Units whose replies have left; their tickets are at most this."""
        behind = (self._num_submitted - self._told_words[0]) & 0xFFFFFFFF
        return self._num_submitted - behind

    @property
    def error(self) -> str | None:
        """What a kernel found wrong first, or None."""
        code, peer, layer, got_layer, rows = self._told_words[ERROR_AT : ERROR_AT + 5]
        if not code:
            return None
        return _ERRORS[code].format(peer=peer, layer=layer, got_layer=got_layer, rows=rows)

    def clear_error(self) -> None:
        """Forget it; whoever it was about has been sent away."""
        self._told_words[ERROR_AT] = 0
