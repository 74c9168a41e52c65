"""Attention of a captured step in several micro-batches: a backend of its own for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

__all__ = ["AttentionBackend", "SplitAttention", "part_of"]


class SplitAttention(AttentionBackend):
    """Prepares every micro-batch's backend for its even share of a padded decode batch.

    The model never sees it: each micro-batch runs with its own backend in force.
    """

    def __init__(self, parts: Sequence[AttentionBackend]) -> None:
        self._parts = tuple(parts)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Take the memory that graphs will name.

        Args:
            max_bs: Sequences of one micro-batch at most.
            max_num_tokens: Rows of one micro-batch at most.
        """
        for backend in self._parts:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """See SGLang's."""
        return int(self._parts[0].get_cuda_graph_seq_len_fill_value())

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture and before each replay.

        Args:
            forward_batch: Padded; a multiple of the number of micro-batches.
            in_capture: Is it captured next?
        """
        for index, backend in enumerate(self._parts):
            part = part_of(forward_batch, index, len(self._parts))
            backend.init_forward_metadata_out_graph(part, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Inside a capture."""
        for index, backend in enumerate(self._parts):
            part = part_of(forward_batch, index, len(self._parts))
            backend.init_forward_metadata_in_graph(part)


def part_of(batch: Any, index: int, number: int) -> SimpleNamespace:
    """What a backend reads of a padded decode batch, for one of `number` even parts.

    Args:
        batch: A `ForwardBatch` at capture, what SGLang shows its backends in its place at a replay.
        index: Of the part.
        number: Of parts; the padded batch is a multiple of it.
    """
    size = batch.batch_size // number
    own = slice(index * size, (index + 1) * size)
    seq_lens_cpu = batch.seq_lens_cpu
    if seq_lens_cpu is not None:
        seq_lens_cpu = seq_lens_cpu[own]
    return SimpleNamespace(
        batch_size=size,
        forward_mode=batch.forward_mode,
        actual_forward_mode=batch.forward_mode,
        input_ids=batch.input_ids[own],
        positions=batch.positions[own],
        req_pool_indices=batch.req_pool_indices[own],
        seq_lens=batch.seq_lens[own],
        seq_lens_sum=None if seq_lens_cpu is None else int(seq_lens_cpu.sum()),
        seq_lens_cpu=seq_lens_cpu,
        num_padding=0,
        encoder_lens=None,
        # At a replay it has no padding, so the last part may have fewer.
        out_cache_loc=batch.out_cache_loc[own],
        out_cache_loc_dsv4=None,
        mamba_track_indices=_rows_or_none(batch.mamba_track_indices, own),
        spec_info=None,
    )


def _rows_or_none(tensor: Any, own: slice) -> Any:
    return None if tensor is None else tensor[own]
