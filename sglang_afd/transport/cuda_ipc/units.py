"""One expert run on the MLP side: pull the members' rows, and push their partial sums back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sglang_afd.transport.base import Rows
from sglang_afd.transport.cuda_ipc import driver, kernels
from sglang_afd.transport.cuda_ipc.kernels import POINTER, U32, VECTOR_BYTES
from sglang_afd.transport.cuda_ipc.peer_table import PeerTable
from sglang_afd.transport.cuda_ipc.unit_ring import (
    ERROR_AT,
    HEADER_WORDS,
    MEMBER_WORDS,
    RING_UNITS,
    TOLD_WORDS,
    UnitRing,
)

_PLANNED_BYTES = 88


class UnitExchange(UnitRing):
    """Gathers units into staging buffers, and sends what the experts made of them.

    `submit` one unit on the host, then launch `pull`, the experts and `push` in one stream, eagerly
    or as a graph; units run in the order of their tickets.

    Args:
        table: The peers.
        hidden_size: H.
        top_k: K.
        dtype: Of hidden states and partial sums.
        first_expert: The first logical expert of this rank.
        stop_expert: One past the last.
        layer_ids: The MoE layers, for `expert_counts`.
        max_unit_rows: Rows of the largest unit.
    """

    def __init__(
        self,
        table: PeerTable,
        *,
        hidden_size: int,
        top_k: int,
        dtype: torch.dtype,
        first_expert: int,
        stop_expert: int,
        layer_ids: Sequence[int],
        max_unit_rows: int,
    ) -> None:
        self._peers = table
        self._first_expert = first_expert
        self._num_experts = stop_expert - first_expert
        self._vectors = hidden_size * dtype.itemsize // VECTOR_BYTES
        self._top_k = top_k
        self._block = kernels.block_of(self._vectors)
        self._module = kernels.module(table.device, str(dtype).removeprefix("torch."))
        device = f"cuda:{table.device}"
        self.max_unit_rows = max_unit_rows
        self.hidden_states = torch.zeros(max_unit_rows, hidden_size, dtype=dtype, device=device)
        self.topk_ids = torch.full((max_unit_rows, top_k), -1, dtype=torch.int32, device=device)
        self.topk_weights = torch.zeros(max_unit_rows, top_k, device=device)
        self.expert_counts = torch.zeros(
            len(layer_ids), self._num_experts, dtype=torch.int64, device=device
        )
        self.max_members = -(-table.max_peers // kernels.WARP) * kernels.WARP
        self._unit_words = HEADER_WORDS + self.max_members * MEMBER_WORDS
        self._ring = torch.zeros(RING_UNITS, self._unit_words, dtype=torch.int32, pin_memory=True)
        self._plan = torch.zeros(
            HEADER_WORDS * 4 + self.max_members * _PLANNED_BYTES, dtype=torch.uint8, device=device
        )
        self._told = torch.zeros(TOLD_WORDS, dtype=torch.int32, pin_memory=True)
        super().__init__(
            table,
            {layer_id: index for index, layer_id in enumerate(layer_ids)},
            self._ring.numpy().view(np.uint32),
            self._told.numpy().view(np.uint32),
        )
        torch.cuda.current_stream(table.device).synchronize()

    def pull(self, bucket: int) -> Rows:
        """Wait for the members' rows and gather them; capturable.

        Args:
            bucket: Rows that the buffers are laid out for.

        Returns: Views of the first `bucket` rows of the staging buffers, with ids as this rank
            counts its experts; -1 where a choice is not ours, and in rows beyond the unit's.
        """
        table = self._peers
        stream = driver.current_stream(table.device)
        driver.launch(
            self._module.function("afd_plan"),
            stream,
            1,
            kernels.WARP,
            kernels.arguments(
                (self._plan.data_ptr(), POINTER),
                (self._ring.data_ptr(), POINTER),
                (self._unit_words * 4, U32),
                (RING_UNITS, U32),
                (table.address, POINTER),
                (self._told.data_ptr() + ERROR_AT * 4, POINTER),
                (bucket, U32),
            ),
        )
        driver.launch(
            self._module.function("afd_pull"),
            stream,
            bucket,
            self._block,
            kernels.arguments(
                (self._plan.data_ptr(), POINTER),
                (self.hidden_states.data_ptr(), POINTER),
                (self.topk_ids.data_ptr(), POINTER),
                (self.topk_weights.data_ptr(), POINTER),
                (self.expert_counts.data_ptr(), POINTER),
                (self._vectors, U32),
                (self._top_k, U32),
                (self._first_expert, U32),
                (self._num_experts, U32),
            ),
        )
        return Rows(
            hidden_states=self.hidden_states[:bucket],
            topk_ids=self.topk_ids[:bucket],
            topk_weights=self.topk_weights[:bucket],
        )

    def push(self, partial: Tensor, bucket: int) -> None:
        """Send the members their rows of `partial`, [bucket, H], contiguous; capturable."""
        if not partial.is_contiguous() or partial.dtype != self.hidden_states.dtype:
            raise AssertionError(f"partial sums came as {partial.dtype}, or not contiguous")
        driver.launch(
            self._module.function("afd_push"),
            driver.current_stream(self._peers.device),
            bucket,
            self._block,
            kernels.arguments(
                (self._plan.data_ptr(), POINTER),
                (self._peers.address, POINTER),
                (partial.data_ptr(), POINTER),
                (self._told.data_ptr(), POINTER),
                (self._vectors, U32),
            ),
        )
