"""A few times a second: does the GPU still work, and how often was each expert chosen?"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from sglang_afd.errors import AfdError
from sglang_afd.mlp.board import Board, Counter

COUNT_S = 1.0  # between two copies of the counts


class DeviceFailed(AfdError):
    """The GPU reported an error, after which this process can do nothing more with it."""


class DeviceWatch:
    """Called by the loop; never waits for the GPU.

    Args:
        stream: In which units run.
        expert_counts: [layers, num_local] int64 on the GPU, written by kernels.
        board: Gets their sums over the layers.
    """

    def __init__(self, stream: torch.cuda.Stream, expert_counts: Tensor, board: Board) -> None:
        self._stream = stream
        self._counts = expert_counts
        self._words = board.words[len(Counter) :]
        self._copy_stream = torch.cuda.Stream()
        self._copied = torch.empty(expert_counts.shape, dtype=torch.int64, pin_memory=True)
        self._is_copied = torch.cuda.Event()
        self._is_copying = False
        self._copy_at_s = 0.0

    def look(self, *, is_busy: bool) -> None:
        """See whether all is well.

        Args:
            is_busy: Units are in flight.

        Raises:
            DeviceFailed: It is not.
        """
        try:
            if is_busy:
                self._stream.query()
            self._count()
        except RuntimeError as error:
            raise device_failed(error) from error

    def _count(self) -> None:
        if self._is_copying and self._is_copied.query():
            self._is_copying = False
            sums = self._copied.sum(dim=0).numpy()
            self._words[: len(sums)] = sums
        now_s = time.monotonic()
        if self._is_copying or now_s < self._copy_at_s:
            return
        self._copy_at_s = now_s + COUNT_S
        with torch.cuda.stream(self._copy_stream):
            # Words that kernels add to meanwhile: a count may be that of a moment earlier.
            self._copied.copy_(self._counts, non_blocking=True)
            self._is_copied.record()
        self._is_copying = True


def device_failed(error: Exception) -> DeviceFailed:
    """What to tell of an error that CUDA raised."""
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    return DeviceFailed(
        f"the GPU failed: {first_line}; this server ends, start it again. On a GPU that servers "
        f"share under MPS, the others may have been hit as well"
    )
