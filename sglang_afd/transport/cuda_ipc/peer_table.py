"""The MLP side's way to attention servers' slots: mappings, doorbells, a table on the device."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_afd.errors import CapacityError
from sglang_afd.protocol.messages import Dispatch
from sglang_afd.transport.base import Rows
from sglang_afd.transport.cuda_ipc import driver, layout
from sglang_afd.transport.cuda_ipc.doorbells import Doorbells
from sglang_afd.transport.cuda_ipc.layout import SlabShape
from sglang_afd.transport.cuda_ipc.streams import own_stream

_ROW = np.dtype(  # struct Peer of exchange.cu
    [
        (name, "<u8")
        for name in ("slab", "slot_bytes", "states", "scales", "ids", "weights", "reply")
    ]
    + [(name, "<u4") for name in ("epoch_low", "epoch_high", "is_alive", "is_fp8")]
)
_ALIVE_OFFSET = _ROW.fields["is_alive"][1] if _ROW.fields else 0


@dataclass(kw_only=True)
class _Peer:
    shape: SlabShape
    memory: driver.SharedMemory
    doorbells: Doorbells


class PeerTable:
    """Slabs by peer index; kernels find them through `address`, which no capture has to know anew.

    Used by one thread.

    Args:
        max_peers: Rows of the table.
        rank: Ours, which chooses the reply areas.
        device: CUDA's index of the GPU.
    """

    def __init__(self, *, max_peers: int, rank: int, device: int) -> None:
        self.max_peers = max_peers
        self.rank = rank
        self.device = device
        self._peers: dict[int, _Peer] = {}
        self._stream = own_stream(device, is_urgent=True)  # it ends waits
        self._rows = torch.zeros(
            max_peers, _ROW.itemsize, dtype=torch.uint8, device=f"cuda:{device}"
        )
        torch.cuda.current_stream(device).synchronize()
        self.address = self._rows.data_ptr()

    def open(self, fds: tuple[int, int], shape: SlabShape, epoch: int) -> int:
        """Map a peer's slab and doorbell page; the caller closes the descriptors.

        Returns: Its index.
        Raises:
            CapacityError: The table is full, or the slab has no place for this rank's replies.
            CudaError: The descriptor names no such memory.
        """
        index = next((i for i in range(self.max_peers) if i not in self._peers), None)
        if index is None:
            raise CapacityError(
                f"{self.max_peers} attention servers are attached, see --afd-max-peers"
            )
        if self.rank >= shape.max_ranks:
            raise CapacityError(
                f"this is MLP rank {self.rank}; the attention server has room for the replies of "
                f"{shape.max_ranks} ranks, see --afd-max-mlp-ranks"
            )
        memory = driver.SharedMemory(shape.num_bytes, self.device, fds[0])
        page = mmap.mmap(fds[1], layout.DOORBELL_BYTES, prot=mmap.PROT_READ)
        doorbells = Doorbells(memoryview(page), shape.num_slots)
        self._peers[index] = _Peer(shape=shape, memory=memory, doorbells=doorbells)
        self._write(index, self._row_of(shape, memory, epoch))
        return index

    def mark_dead(self, index: int) -> None:
        """Nothing waits for this peer from now on, in whatever is enqueued."""
        with driver.on_device(self.device):
            alive = self.address + index * _ROW.itemsize + _ALIVE_OFFSET
            driver.set_words(self._stream.cuda_stream, alive, 0)
        self._stream.synchronize()

    def close(self, index: int) -> None:
        """Unmap; once no unit in flight names this peer."""
        peer = self._peers.pop(index)
        peer.memory.close()
        # NOTE: the doorbells hold the page's buffer, which closes with them.

    def doorbells(self, index: int) -> Doorbells:
        """Of one peer, until it is closed."""
        return self._peers[index].doorbells

    def rung(self, index: int) -> Sequence[Dispatch]:
        """See `Doorbells.rung`."""
        return self._peers[index].doorbells.rung()

    def seq_of_next(self, index: int, slot: int, *, is_served: bool) -> int:
        """See `Doorbells.seq_of_next`."""
        return self._peers[index].doorbells.seq_of_next(slot, is_served=is_served)

    def rows_of(self, index: int, slot: int, num_rows: int) -> Rows:
        """Views of a slot that holds rows in the slab's own dtype; for eager use."""
        peer = self._peers[index]
        shape = peer.shape
        if shape.is_fp8:
            raise AssertionError("rows in FP8 are read by kernels only")

        def view(area: str, width: int, dtype: torch.dtype) -> torch.Tensor:
            return peer.memory.view(shape.slot_offset(slot, area), (num_rows, width), dtype)

        return Rows(
            hidden_states=view("hidden_states", shape.hidden_size, getattr(torch, shape.dtype)),
            topk_ids=view("topk_ids", shape.top_k, torch.int32),
            topk_weights=view("topk_weights", shape.top_k, torch.float32),
        )

    def _row_of(
        self, shape: SlabShape, memory: driver.SharedMemory, epoch: int
    ) -> npt.NDArray[np.void]:
        areas = shape.areas
        row = np.zeros((), _ROW)
        row["slab"] = memory.address + layout.PAGE_BYTES
        row["slot_bytes"] = areas["end"]
        row["states"], row["scales"] = areas["hidden_states"], areas["scales"]
        row["ids"], row["weights"] = areas["topk_ids"], areas["topk_weights"]
        row["reply"] = areas["replies"] + self.rank * shape.reply_bytes
        row["epoch_low"], row["epoch_high"] = epoch & 0xFFFFFFFF, epoch >> 32
        row["is_alive"], row["is_fp8"] = 1, int(shape.is_fp8)
        return row

    def _write(self, index: int, row: npt.NDArray[np.void]) -> None:
        host = torch.frombuffer(bytearray(row.tobytes()), dtype=torch.uint8)
        with torch.cuda.stream(self._stream):
            self._rows[index].copy_(host)
        self._stream.synchronize()
