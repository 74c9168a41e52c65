"""A slab and its doorbell page as another process has them, on memory that a host can map."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

from sglang_afd.transport.cuda_ipc import layout
from sglang_afd.transport.cuda_ipc.doorbells import Doorbells
from sglang_afd.transport.cuda_ipc.slab import Slab


class Mapped:
    """Views of `made`, which is somebody else's."""

    def __init__(self, made: Slab) -> None:
        self.shape = made.shape
        self._bytes = torch.frombuffer(
            mmap.mmap(made.fds[0], made.shape.num_bytes), dtype=torch.uint8
        )
        page = mmap.mmap(made.fds[1], layout.DOORBELL_BYTES, prot=mmap.PROT_READ)
        self.doorbells = Doorbells(memoryview(page), made.shape.num_slots)
        self.line = np.frombuffer(page, np.uint32)

    def words(self, slot: int) -> Tensor:
        """Of one slot."""
        start = self.shape.slot_offset(slot)
        return self._bytes[start : start + layout.PAGE_BYTES].view(torch.int32)

    def area(self, slot: int, name: str, width: int, dtype: torch.dtype) -> Tensor:
        """All rows of one area; of the first rank if they are replies."""
        start = self.shape.slot_offset(slot, name)
        num_bytes = self.shape.max_rows * width * dtype.itemsize
        return self._bytes[start : start + num_bytes].view(dtype).view(-1, width)

    def request(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states in the dtype of the model, ids and weights."""
        shape = self.shape
        return (
            self.area(slot, "hidden_states", shape.hidden_size, getattr(torch, shape.dtype)),
            self.area(slot, "topk_ids", shape.top_k, torch.int32),
            self.area(slot, "topk_weights", shape.top_k, torch.float32),
        )

    def replies(self, slot: int, rank: int) -> Tensor:
        """What a rank replies."""
        shape = self.shape
        start = shape.slot_offset(slot, "replies") + rank * shape.reply_bytes
        rows = self._bytes[start : start + shape.max_rows * shape.row_bytes]
        return rows.view(getattr(torch, shape.dtype)).view(-1, shape.hidden_size)

    def fill(self, value: int) -> None:
        """Every byte of every slot but those of its words."""
        for slot in range(self.shape.num_slots):
            start = self.shape.slot_offset(slot)
            stop = start + self.shape.areas["end"]
            self._bytes[start + layout.PAGE_BYTES : stop] = value

    def copy(self) -> Tensor:
        """All that the slots hold now."""
        return self._bytes[layout.PAGE_BYTES :].clone()

    def is_pending(self, slot: int) -> bool:
        """Has what is in the slot not been replied to by all?"""
        words = self.words(slot)
        return bool(words[layout.NUM_REPLIED] != words[layout.NUM_WANTED])
