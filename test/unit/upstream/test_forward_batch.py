from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_afd.errors import UpstreamMismatch
from sglang_afd.rounds.splitting import split
from sglang_afd.upstream import forward_batch
from sglang_afd.upstream.forward_batch import (
    ForwardBatch,
    ForwardMode,
    make_child,
    rows_of_sequences,
)


def decode(num_sequences: int, **changes: Any) -> ForwardBatch:
    seq_lens = torch.arange(10, 10 + num_sequences)
    values: dict[str, Any] = {
        "forward_mode": ForwardMode.DECODE,
        "batch_size": num_sequences,
        "input_ids": torch.arange(num_sequences) + 100,
        "req_pool_indices": torch.arange(num_sequences) + 200,
        "seq_lens": seq_lens,
        "out_cache_loc": torch.arange(num_sequences) + 300,
        "seq_lens_sum": int(seq_lens.sum()),
        "seq_lens_cpu": seq_lens.clone(),
        "positions": seq_lens - 1,
        "num_token_non_padded_cpu": num_sequences,
        "lora_ids": [None] * num_sequences,
        "rids": [f"request {index}" for index in range(num_sequences)],
    }
    return ForwardBatch(**(values | changes))


def extend(prefixes: list[int], lengths: list[int], **changes: Any) -> ForwardBatch:
    num_rows = sum(lengths)
    seq_lens = torch.tensor(prefixes) + torch.tensor(lengths)
    positions = [
        torch.arange(prefix, prefix + length)
        for prefix, length in zip(prefixes, lengths, strict=True)
    ]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    values = {
        "forward_mode": ForwardMode.EXTEND,
        "input_ids": torch.arange(num_rows) + 100,
        "seq_lens": seq_lens,
        "seq_lens_cpu": seq_lens.clone(),
        "seq_lens_sum": int(seq_lens.sum()),
        "out_cache_loc": torch.arange(num_rows) + 300,
        "positions": torch.cat(positions),
        "num_token_non_padded_cpu": num_rows,
        "extend_num_tokens": num_rows,
        "extend_seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "extend_prefix_lens": torch.tensor(prefixes, dtype=torch.int32),
        "extend_start_loc": starts.to(torch.int32),
        "extend_prefix_lens_cpu": prefixes,
        "extend_seq_lens_cpu": lengths,
        "extend_logprob_start_lens_cpu": [0] * len(lengths),
    }
    return decode(len(lengths), **(values | changes))


def children(batch: ForwardBatch, number: int) -> list[ForwardBatch]:
    rows = rows_of_sequences(batch)
    assert rows is not None
    return [make_child(batch, rows, part) for part in split(rows, number)]


def copy_of(batch: ForwardBatch) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in vars(batch).items()
    }


def test_a_decode_step_is_divided_by_sequence() -> None:
    first, second = children(decode(5), 2)

    assert (first.batch_size, second.batch_size) == (2, 3)
    assert second.input_ids.tolist() == [102, 103, 104]
    assert second.req_pool_indices.tolist() == [202, 203, 204]
    assert second.out_cache_loc.tolist() == [302, 303, 304]
    assert second.positions.tolist() == [11, 12, 13]
    assert second.seq_lens.tolist() == second.seq_lens_cpu.tolist() == [12, 13, 14]
    assert second.seq_lens_sum == 39
    assert second.rids == ["request 2", "request 3", "request 4"]
    assert second.num_token_non_padded_cpu == 3
    assert second.extend_seq_lens is None
    assert second.sampling_info is None


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize(
    ("prefixes", "lengths"),
    [
        ([0], [90]),  # one prompt
        ([128], [90]),  # its next chunk
        ([5, 0, 17], [40, 3, 60]),  # radix-cache hits
        ([6, 9, 12, 30], [1, 1, 1, 70]),  # a mixed batch
        ([0, 0], [1, 99]),
    ],
)
def test_a_sequence_that_is_cut_attends_to_its_earlier_rows_as_to_a_prefix(
    prefixes: list[int], lengths: list[int], number: int
) -> None:
    batch = extend(prefixes, lengths)

    found = children(batch, number)

    seen = []
    for child in found:
        assert child.extend_num_tokens == len(child.input_ids) == sum(child.extend_seq_lens_cpu)
        assert child.extend_seq_lens.tolist() == child.extend_seq_lens_cpu
        assert child.extend_prefix_lens.tolist() == child.extend_prefix_lens_cpu
        sums = [sum(pair) for pair in zip(child.extend_prefix_lens_cpu, child.extend_seq_lens_cpu)]  # noqa: B905
        assert child.seq_lens.tolist() == child.seq_lens_cpu.tolist() == sums
        assert child.seq_lens_sum == sum(sums)
        for index, start in enumerate(child.extend_start_loc.tolist()):
            stop = start + child.extend_seq_lens_cpu[index]
            request = int(child.req_pool_indices[index])
            prefix = child.extend_prefix_lens_cpu[index]
            positions = child.positions[start:stop].tolist()
            assert positions == list(range(prefix, prefix + stop - start))
            seen += [(request, position) for position in positions]
    whole = [
        (200 + index, prefix + offset)
        for index, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True))
        for offset in range(length)
    ]
    assert seen == whole
    assert torch.equal(torch.cat([child.out_cache_loc for child in found]), batch.out_cache_loc)


def test_the_whole_batch_is_left_as_it_was() -> None:
    batch = extend([5, 0], [40, 60])
    before = copy_of(batch)

    for child in children(batch, 3):
        child.seq_lens_cpu = None

    for name, value in copy_of(batch).items():
        same = torch.equal(value, before[name]) if isinstance(value, Tensor) else None
        assert same if same is not None else value == before[name], name


def test_several_positions_a_row_are_divided_by_row() -> None:
    batch = extend([0], [6], mrope_positions=torch.arange(18).reshape(3, 6))

    _, second = children(batch, 2)

    assert second.mrope_positions.tolist() == [[3, 4, 5], [9, 10, 11], [15, 16, 17]]


def test_embeddings_are_divided_by_row() -> None:
    _, second = children(extend([0], [6], input_embeds=torch.arange(12).reshape(6, 2)), 2)

    assert second.input_embeds.tolist() == [[6, 7], [8, 9], [10, 11]]


def test_lengths_may_be_unknown_to_the_host() -> None:
    first, _ = children(decode(4, seq_lens_cpu=None, seq_lens_sum=None), 2)

    assert first.seq_lens_cpu is None
    assert first.seq_lens_sum is None


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_mode": ForwardMode.TARGET_VERIFY},
        {"forward_mode": ForwardMode.IDLE},
        {"spec_info": object()},
        {"mm_inputs": [None, object(), None]},
        {"multi_item_delimiter_indices": [torch.tensor([1])] * 3},
        {"positions": torch.arange(8)},  # padded
    ],
)
def test_other_steps_stay_whole(changes: dict[str, Any]) -> None:
    assert rows_of_sequences(decode(3, **changes)) is None


def test_an_extend_whose_lengths_the_host_does_not_know_stays_whole() -> None:
    assert rows_of_sequences(extend([0], [6], extend_seq_lens_cpu=None)) is None


@pytest.mark.parametrize("name", ["encoder_lens", "token_type_ids", "global_num_tokens_gpu"])
def test_a_field_that_we_cannot_divide_is_refused_by_name(name: str) -> None:
    batch = decode(4, **{name: torch.zeros(4)})

    with pytest.raises(UpstreamMismatch, match=f"{name} set.*--afd-num-micro-batches 1"):
        children(batch, 2)


# Fields that are refused when set; a field that is neither here nor known is new in SGLang.
REFUSED = {
    "attn_cp_metadata",
    "attn_dcp_metadata",
    "cross_attention_custom_mask",
    "dcp_kv_mask",
    "dimensions",
    "dp_local_num_tokens",
    "dp_local_start_pos",
    "dp_padding_mode",
    "encoder_cached",
    "encoder_lens",
    "encoder_lens_cpu",
    "encoder_out_cache_loc",
    "global_dp_buffer_len",
    "global_num_tokens_cpu",
    "global_num_tokens_for_logprob_cpu",
    "global_num_tokens_for_logprob_gpu",
    "global_num_tokens_gpu",
    "hidden_states",
    "mamba_clear_indices",
    "mamba_cow_dst_indices",
    "mamba_cow_src_indices",
    "minimax_m3_precached_sparse_layers",
    "mm_input_embeds",
    "model_specific_states",
    "multi_item_delimiter_indices",
    "ngram_embedding_info",
    "num_token_non_padded",
    "original_global_num_tokens_cpu",
    "out_cache_loc_dsv4",
    "req_all_ids_flat",
    "req_all_ids_lens",
    "residual",
    "spec_info",
    "split_index",
    "tbo_children",
    "tbo_padded_len",
    "tbo_parent_token_range",
    "tbo_split_seq_index",
    "token_type_ids",
    "_attn_output",
    "_original_batch_size",
    "_original_forward_mode",
    "_original_num_tokens",
}


def test_every_field_of_a_batch_is_either_divided_or_refused() -> None:
    fields = {field.name for field in dataclasses.fields(ForwardBatch)}

    assert fields - REFUSED == forward_batch._KNOWN
    assert fields >= REFUSED
