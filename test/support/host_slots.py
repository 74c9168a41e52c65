"""Slots without a GPU: real descriptors and real doorbells, and no rows behind them."""

from __future__ import annotations

import mmap
import os

import numpy as np

from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.cuda_ipc import layout
from sglang_afd.transport.cuda_ipc.doorbells import Doorbells
from sglang_afd.transport.cuda_ipc.layout import LinkWord, SlabShape
from sglang_afd.transport.cuda_ipc.peer_table import PeerTable
from sglang_afd.transport.cuda_ipc.slab import Slab


class HostSlab(Slab):
    """What a link uses of a slab, and the doorbells, written by the host."""

    def __init__(self, shape: SlabShape) -> None:
        self.shape = shape
        self.link = LinkWord.DETACHED
        self.epoch = 0
        self.num_ranks = 0
        self.fds = os.memfd_create("afd-slab"), os.memfd_create("afd-page")
        os.write(self.fds[0], b"slots")
        os.ftruncate(self.fds[1], layout.DOORBELL_BYTES)
        self._page = mmap.mmap(self.fds[1], layout.DOORBELL_BYTES)
        self._pending: dict[int, tuple[int, ...]] = {}  # by slot, what its header says but epoch

    def attach(self, epoch: int, num_ranks: int) -> None:
        """See `Slab`."""
        self.link, self.epoch, self.num_ranks = LinkWord.ATTACHED, epoch, num_ranks
        for slot in self._pending:
            self._ring(slot)

    def abort(self) -> None:
        """See `Slab`."""
        self.link = LinkWord.ABORTED
        self._pending.clear()

    def put(self, slot: int, *, step: int = 1, layer_id: int = 1, num_rows: int = 2) -> None:
        """A request that is not answered."""
        self._pending[slot] = (step, layer_id, num_rows)
        self._ring(slot)

    def close(self) -> None:
        """Close what was ours."""
        for fd in self.fds:
            os.close(fd)

    def _ring(self, slot: int) -> None:
        step, layer_id, num_rows = self._pending[slot]
        start = slot * layout.DOORBELL_LINE_BYTES
        line = np.frombuffer(self._page, "<u4")[start // 4 :]
        words = (1, self.epoch & 0xFFFFFFFF, self.epoch >> 32, step, 0, layer_id, slot, num_rows)
        ring = (int(line[0]) + 1, *words, layout.KINDS.index(Kind.DECODE), 1)
        line[1:12] = (*ring[1:], layout.sum_of_ring(ring))
        line[0] = ring[0]


class HostTable(PeerTable):
    """What a hub uses of a table; remembers what it was told to map and unmap."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.opened: dict[int, mmap.mmap] = {}
        self.contents: list[bytes] = []
        self.dead: list[int] = []
        self.closed: list[int] = []
        self._doorbells: dict[int, Doorbells] = {}

    def open(self, fds: tuple[int, int], shape: SlabShape, epoch: int) -> int:
        """See `PeerTable`."""
        index = len(self.contents)
        self.contents.append(os.pread(fds[0], 100, 0))
        self.opened[index] = mmap.mmap(fds[1], layout.DOORBELL_BYTES, prot=mmap.PROT_READ)
        self._doorbells[index] = Doorbells(memoryview(self.opened[index]), shape.num_slots)
        return index

    def mark_dead(self, index: int) -> None:
        """See `PeerTable`."""
        self.dead.append(index)

    def close(self, index: int) -> None:
        """See `PeerTable`."""
        self.closed.append(index)
        del self._doorbells[index], self.opened[index]

    def doorbells(self, index: int) -> Doorbells:
        """See `PeerTable`."""
        return self._doorbells[index]

    def seq_of_next(self, index: int, slot: int, *, is_served: bool) -> int:
        """See `PeerTable`."""
        return self._doorbells[index].seq_of_next(slot, is_served=is_served)
