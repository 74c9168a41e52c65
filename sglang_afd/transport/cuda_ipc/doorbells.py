"""One attention server's doorbells, as the host of an MLP rank reads them from a shared page."""

from __future__ import annotations

import numpy as np

from sglang_afd.transport.cuda_ipc import layout
from sglang_afd.transport.cuda_ipc.layout import SlotHeader


class Doorbells:
    """What rang, and which exchange of each slot is served next.

    Args:
        page: Of DOORBELL_BYTES, mapped; another process writes it.
        num_slots: A line for each.
    """

    def __init__(self, page: memoryview, num_slots: int) -> None:
        lines = np.frombuffer(page, "<u4")[: num_slots * layout.DOORBELL_LINE_BYTES // 4]
        self._lines = lines.reshape(num_slots, -1)
        self._rings = self._lines[:, 0].copy()
        self._next_seqs: dict[int, int] = {}

    def rung(self) -> list[SlotHeader]:
        """What they said since the last call."""
        fresh = np.flatnonzero(self._lines[:, 0] != self._rings)
        headers = []
        for slot in fresh.tolist():
            rings, *words = self._lines[slot, : layout.NUM_HEADER_WORDS + 2].tolist()
            if layout.sum_of_ring([rings, *words[:-1]]) != words[-1]:
                continue  # it is ringing; the next call sees all of it
            header = SlotHeader.from_words(words)
            self._rings[slot] = rings
            self._next_seqs.setdefault(slot, header.seq)
            headers.append(header)
        return headers

    def seq_of_next(self, slot: int, *, is_served: bool) -> int:
        """Sequence number of the exchange that is served next; it goes on once it `is_served`."""
        seq = self._next_seqs[slot]
        if is_served:
            self._next_seqs[slot] = (seq + 1) & 0xFFFFFFFF
        return seq
