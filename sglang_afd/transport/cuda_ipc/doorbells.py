"""One attention server's doorbells, as the host of an MLP rank reads them from a shared page."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_afd.protocol.messages import Dispatch
from sglang_afd.transport.cuda_ipc import layout

_LINE_WORDS = layout.DOORBELL_LINE_BYTES // 4
_NUM_SUMMED = 1 + layout.NUM_HEADER_WORDS


class Doorbells:
    """What rang, and which exchange of each slot is served next.

    Read every few microseconds by a loop that waits for them, so nothing is made while none rings.

    Args:
        page: Of DOORBELL_BYTES, mapped; another process writes it.
        num_slots: A line for each.
    """

    def __init__(self, page: memoryview, num_slots: int) -> None:
        self._words = page.cast("B").cast("I")
        self._starts = range(0, num_slots * _LINE_WORDS, _LINE_WORDS)
        self._rings = [self._words[start] for start in self._starts]  # as seen last
        self._next_seqs: dict[int, int] = {}  # by slot; known from its first ring

    def rung(self) -> Sequence[Dispatch]:
        """What they said since the last call."""
        words = self._words
        found: Sequence[Dispatch] = ()
        for seen, start in zip(self._rings, self._starts, strict=True):
            if words[start] != seen and (header := self._take(start)) is not None:
                found = [*found, header]
        return found

    def seq_of_next(self, slot: int, *, is_served: bool) -> int:
        """Sequence number of the exchange that is served next; it goes on once it `is_served`."""
        seq = self._next_seqs[slot]
        if is_served:
            self._next_seqs[slot] = (seq + 1) & 0xFFFFFFFF
        return seq

    def _take(self, start: int) -> Dispatch | None:
        """Read one line; None while it is ringing, and the next call sees all of it."""
        line = self._words[start : start + _NUM_SUMMED + 1].tolist()
        if layout.sum_of_ring(line[:_NUM_SUMMED]) != line[_NUM_SUMMED]:
            return None
        slot = start // _LINE_WORDS
        self._rings[slot] = line[0]
        seq, header = layout.header_of(line[1:])
        self._next_seqs.setdefault(slot, seq)
        return header
