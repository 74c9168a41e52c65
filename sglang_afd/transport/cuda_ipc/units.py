"""One expert run on the MLP side: pull the members' rows, and push their partial sums back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglang_afd.transport.base import Rows
from sglang_afd.transport.cuda_ipc import driver, kernels
from sglang_afd.transport.cuda_ipc.kernels import POINTER, U32, VECTOR_BYTES
from sglang_afd.transport.cuda_ipc.peer_table import PeerTable

RING_UNITS = 64  # descriptors that may be submitted and not yet done
_EVERY_ROW = 0xFFFFFFFF
_HEADER_WORDS = 8  # of struct Unit and of struct Plan in exchange.cu
_MEMBER_WORDS = 4
_PLANNED_BYTES = 24
_ERRORS = {
    1: "attention server {peer} has rows for layer {got_layer}, expected those for layer {layer}",
    2: "attention server {peer} has {rows} rows for layer {layer}, not those that it announced",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitMemberRef:
    """One exchange of a unit, as kernels find it."""

    peer_index: int
    slot: int
    num_rows: int


class UnitExchange:
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
        self._table = table
        self._first_expert = first_expert
        self._num_experts = stop_expert - first_expert
        self._layers = {layer_id: index for index, layer_id in enumerate(layer_ids)}
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
        self._unit_words = _HEADER_WORDS + self.max_members * _MEMBER_WORDS
        self._ring = torch.zeros(RING_UNITS, self._unit_words, dtype=torch.int32, pin_memory=True)
        self._ring_words = self._ring.numpy().view(np.uint32)
        self._plan = torch.zeros(
            _HEADER_WORDS * 4 + self.max_members * _PLANNED_BYTES, dtype=torch.uint8, device=device
        )
        self._told = torch.zeros(64, dtype=torch.int32, pin_memory=True)  # done, then the error
        self._told_words = self._told.numpy().view(np.uint32)
        self._error_at = 32
        self._num_submitted = 0
        self._num_done = 0
        torch.cuda.current_stream(table.device).synchronize()

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
            is_last_piece: The members get their replies after it.

        Returns: Its ticket, 1 for the first.
        """
        if self._num_submitted - self.num_done >= RING_UNITS:
            raise AssertionError(f"{RING_UNITS} units are in flight; wait for one before the next")
        words = self._ring_words[self._num_submitted % RING_UNITS]
        self._num_submitted += 1
        for number, member in enumerate(members):
            start = _HEADER_WORDS + number * _MEMBER_WORDS
            words[start : start + _MEMBER_WORDS] = (
                member.peer_index,
                member.slot,
                member.num_rows,
                self._table.seq_of_next(member.peer_index, member.slot, is_served=is_last_piece),
            )
        words[:7] = (
            self._num_submitted & 0xFFFFFFFF,
            self._layers[layer_id],
            layer_id,
            len(members),
            first_row,
            _EVERY_ROW if num_rows is None else num_rows,
            int(is_last_piece),
        )
        return self._num_submitted

    def pull(self, bucket: int) -> Rows:
        """Wait for the members' rows and gather them; capturable.

        Returns: Views of the first `bucket` rows of the staging buffers, with ids as this rank
            counts its experts; -1 where a choice is not ours, and in rows beyond the unit's.
        """
        stream = torch.cuda.current_stream().cuda_stream
        table = self._table
        driver.launch(
            self._module.function("afd_plan"),
            stream,
            1,
            self.max_members,
            kernels.arguments(
                (self._plan.data_ptr(), POINTER),
                (self._ring.data_ptr(), POINTER),
                (self._unit_words * 4, U32),
                (RING_UNITS, U32),
                (table.address, POINTER),
                (self._told.data_ptr() + self._error_at * 4, POINTER),
                (bucket, U32),
            ),
            shared_bytes=self.max_members * 4,
        )
        driver.launch(
            self._module.function("afd_pull"),
            stream,
            bucket,
            self._block,
            kernels.arguments(
                (self._plan.data_ptr(), POINTER),
                (table.address, POINTER),
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
            torch.cuda.current_stream().cuda_stream,
            bucket,
            self._block,
            kernels.arguments(
                (self._plan.data_ptr(), POINTER),
                (self._table.address, POINTER),
                (partial.data_ptr(), POINTER),
                (self._told.data_ptr(), POINTER),
                (self._vectors, U32),
            ),
        )

    @property
    def num_submitted(self) -> int:
        """Units described so far; the last one's ticket."""
        return self._num_submitted

    @property
    def num_done(self) -> int:
        """Units whose replies have left; their tickets are at most this."""
        behind = (self._num_submitted - int(self._told_words[0])) & 0xFFFFFFFF
        self._num_done = self._num_submitted - behind
        return self._num_done

    @property
    def error(self) -> str | None:
        """What a kernel found wrong first, or None."""
        code, peer, layer, got_layer, rows = self._told_words[self._error_at : self._error_at + 5]
        if not code:
            return None
        return _ERRORS[int(code)].format(peer=peer, layer=layer, got_layer=got_layer, rows=rows)

    def clear_error(self) -> None:
        """Forget it; whoever it was about has been sent away."""
        self._told_words[self._error_at] = 0
