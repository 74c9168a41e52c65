"""Children of a `ForwardBatch`: what the inner model and its attention read, for some rows.

Written against the fields of the pinned SGLang: a field that is set and that we do not know stops
the step with its name instead of being lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from torch import Tensor

from sglang_afd.errors import UpstreamMismatch
from sglang_afd.rounds.splitting import Part

__all__ = [
    "CaptureHiddenMode",
    "ForwardBatch",
    "ForwardMode",
    "keeps_hidden_states",
    "make_child",
    "of_graph",
    "rows_of_sequences",
]

# The same for every child.
_SAME = frozenset(
    {
        "forward_mode",
        "is_extend_in_batch",
        "is_prefill_only",
        "spec_algorithm",
        "capture_hidden_mode",
        "return_logprob",
        "return_pooled_hidden_states",
        "return_hidden_states_before_norm",
        "reuse_dsa_topk_indices",
        "can_run_dp_cuda_graph",
        "can_run_dp_breakable_cuda_graph",
        "global_forward_mode",
    }
)
# One entry a row; the last dimension, which is the only one unless there are several positions.
_BY_ROW = frozenset({"input_ids", "positions", "out_cache_loc", "mrope_positions"})
# One entry a sequence.
_BY_SEQUENCE = frozenset(
    {
        "req_pool_indices",
        "orig_seq_lens",
        "mamba_track_indices",
        "mamba_track_mask",
        "mamba_track_seqlens",
        "mm_inputs",  # all None, see `rows_of_sequences`
        "lora_ids",
        "rids",
        "rids_int",
        "bootstrap_room_ids_int",
    }
)
# Made anew for each child, see `_lengths`.
_OWN = frozenset(
    {
        "batch_size",
        "seq_lens",
        "seq_lens_cpu",
        "seq_lens_sum",
        "input_embeds",
        "num_token_non_padded_cpu",
        "extend_num_tokens",
        "extend_seq_lens",
        "extend_seq_lens_cpu",
        "extend_prefix_lens",
        "extend_prefix_lens_cpu",
        "extend_start_loc",
    }
)
# Read before the inner model runs, or after it on the whole batch.
_NOT_READ = frozenset(
    {
        "sampling_info",
        "temperature",
        "top_p",
        "top_logprobs_nums",
        "token_ids_logprobs",
        "next_token_logits_buffer",
        "extend_logprob_start_lens_cpu",
        "extend_input_logprob_token_ids_gpu",
        "replace_embeds",
        "replace_positions",
        "forward_metadata_ready",
        "forward_metadata_planned_bs",
        "forward_metadata_planned_num_tokens",
        "forward_metadata_replan_equivalent",
    }
)
_KNOWN = _SAME | _BY_ROW | _BY_SEQUENCE | _OWN | _NOT_READ
_UNKNOWN = [field for field in dataclasses.fields(ForwardBatch) if field.name not in _KNOWN]


def rows_of_sequences(batch: ForwardBatch) -> Sequence[int] | None:
    """Rows of each sequence in this step, or None for a step that is never cut.

    Never cut are the kinds of steps that this version does not serve (speculative, split prefill),
    batches that are padded or have images or several items to score in them, and those whose
    lengths are on a GPU only.
    """
    if batch.spec_info is not None or batch.multi_item_delimiter_indices is not None:
        return None
    if any(item is not None for item in batch.mm_inputs or ()):
        return None
    rows: Sequence[int] | None
    if batch.forward_mode == ForwardMode.DECODE:
        rows = [1] * batch.batch_size
    elif batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        rows = batch.extend_seq_lens_cpu
    else:
        return None
    is_sound = rows is not None and 0 < sum(rows) == batch.positions.shape[-1]
    return rows if is_sound else None


def keeps_hidden_states(batch: ForwardBatch) -> bool:
    """Are hidden states of this step read after it, as with `--enable-return-hidden-states`?"""
    return batch.capture_hidden_mode not in (None, CaptureHiddenMode.NULL)


def make_child(batch: ForwardBatch, rows: Sequence[int], part: Part) -> ForwardBatch:
    """The `ForwardBatch` of one part; its tensors are views where they can be.

    Args:
        batch: Whole; unchanged.
        rows: `rows_of_sequences(batch)`.
        part: Of `split(rows, ...)`.

    Raises:
        UpstreamMismatch: A field is set that we do not know how to divide.
    """
    _refuse_unknown(batch)
    by_row = slice(part.first_row, part.stop_row)
    by_sequence = slice(part.first_sequence, part.stop_sequence)
    whole = vars(batch)
    values = {name: whole[name] for name in _SAME}
    for names, part_of in ((_BY_ROW, (..., by_row)), (_BY_SEQUENCE, by_sequence)):
        for name in names:
            value = whole[name]
            values[name] = None if value is None else value[part_of]
    values["batch_size"] = part.stop_sequence - part.first_sequence
    values["num_token_non_padded_cpu"] = part.num_rows
    values["input_embeds"] = None if batch.input_embeds is None else batch.input_embeds[by_row]
    values |= _lengths(batch, part)
    if batch.extend_seq_lens is not None:
        values |= _extend_lengths(batch, part.rows_of_sequences(rows), part)
    return ForwardBatch(**values)


def of_graph(batch: ForwardBatch) -> ForwardBatch:
    """A padded batch as it is while a CUDA graph is captured, so that `make_child` can divide it.

    What a graph's batch always carries for data-parallel attention means nothing without it; and
    padded rows are rows like others to the model, since none of them leaves this server.
    """
    return dataclasses.replace(
        batch,
        dp_padding_mode=None,
        global_num_tokens_gpu=None,
        global_num_tokens_for_logprob_gpu=None,
        num_token_non_padded=None,
    )


def _refuse_unknown(batch: ForwardBatch) -> None:
    unknown = sorted(field.name for field in _UNKNOWN if not _is_unset(batch, field))
    if unknown:
        raise UpstreamMismatch(
            f"a step has {', '.join(unknown)} set, which cannot be cut into micro-batches; "
            f"start this server with --afd-num-micro-batches 1"
        )


def _is_unset(batch: ForwardBatch, field: dataclasses.Field[Any]) -> bool:
    value = vars(batch)[field.name]
    if isinstance(value, Tensor):
        return False
    return value is None or value == field.default


def _lengths(batch: ForwardBatch, part: Part) -> dict[str, Any]:
    by_sequence = slice(part.first_sequence, part.stop_sequence)
    seq_lens = _less_at_end(batch.seq_lens[by_sequence], part.num_rows_after)
    seq_lens_cpu = batch.seq_lens_cpu
    if seq_lens_cpu is not None:
        seq_lens_cpu = _less_at_end(seq_lens_cpu[by_sequence], part.num_rows_after)
    return {
        "seq_lens": seq_lens,
        "seq_lens_cpu": seq_lens_cpu,
        "seq_lens_sum": None if seq_lens_cpu is None else int(seq_lens_cpu.sum()),
    }


def _extend_lengths(batch: ForwardBatch, own: list[int], part: Part) -> dict[str, Any]:
    by_sequence = slice(part.first_sequence, part.stop_sequence)
    prefixes_cpu = list(batch.extend_prefix_lens_cpu[by_sequence])
    prefixes_cpu[0] += part.num_rows_before
    prefixes = batch.extend_prefix_lens[by_sequence]
    lengths = batch.extend_seq_lens[by_sequence]
    if part.num_rows_before:
        prefixes, lengths = prefixes.clone(), lengths.clone()
        prefixes[0] += part.num_rows_before
        lengths[0] -= part.num_rows_before
    starts = batch.extend_start_loc
    if starts is not None:
        starts = (starts[by_sequence] - part.first_row).clamp_(min=0)
    return {
        "extend_num_tokens": part.num_rows,
        "extend_seq_lens_cpu": own,
        "extend_seq_lens": _less_at_end(lengths, part.num_rows_after),
        "extend_prefix_lens_cpu": prefixes_cpu,
        "extend_prefix_lens": prefixes,
        "extend_start_loc": starts,
    }


def _less_at_end(lengths: Tensor, amount: int) -> Tensor:
    if amount:
        lengths = lengths.clone()
        lengths[-1] -= amount
    return lengths
