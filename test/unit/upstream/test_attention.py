"""Each micro-batch's attention sees its even share of a padded batch, and all of it is seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_afd.rounds.splitting import split
from sglang_afd.upstream.attention import SplitAttention, part_of
from sglang_afd.upstream.forward_batch import ForwardBatch, ForwardMode, make_child, of_graph

BUCKET, REAL = 6, 5


class Backend:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, bool]] = []

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        self.seen.append(("out", batch, in_capture))

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        self.seen.append(("in", batch, True))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


def replayed() -> SimpleNamespace:
    """As SGLang shows it to a backend; one row of it is padding."""
    return SimpleNamespace(
        batch_size=BUCKET,
        forward_mode=ForwardMode.DECODE,
        actual_forward_mode=ForwardMode.DECODE,
        input_ids=torch.arange(BUCKET),
        positions=torch.arange(BUCKET) + 10,
        req_pool_indices=torch.arange(BUCKET) + 20,
        seq_lens=torch.arange(BUCKET) + 1,
        seq_lens_sum=21,
        seq_lens_cpu=torch.arange(BUCKET) + 1,
        num_padding=BUCKET - REAL,
        encoder_lens=None,
        out_cache_loc=torch.arange(REAL) + 30,
        out_cache_loc_dsv4=None,
        mamba_track_indices=None,
        spec_info=None,
    )


def captured() -> ForwardBatch:
    """As SGLang's runner builds it for a capture."""
    whole = replayed()
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=BUCKET,
        input_ids=whole.input_ids,
        req_pool_indices=whole.req_pool_indices,
        seq_lens=whole.seq_lens,
        seq_lens_cpu=whole.seq_lens_cpu,
        next_token_logits_buffer=torch.zeros(BUCKET, 3),
        orig_seq_lens=whole.seq_lens,
        out_cache_loc=torch.arange(BUCKET) + 30,
        seq_lens_sum=21,
        return_logprob=False,
        positions=whole.positions,
        global_num_tokens_gpu=torch.zeros(1, dtype=torch.int32),
        global_num_tokens_for_logprob_gpu=torch.zeros(1, dtype=torch.int32),
        dp_padding_mode="max_len",
        mrope_positions=torch.zeros(3, BUCKET, dtype=torch.int64),
        num_token_non_padded=torch.zeros(1, dtype=torch.int32),
        global_forward_mode=ForwardMode.DECODE,
    )
    batch.dp_local_start_pos = batch.dp_local_num_tokens = None
    return batch


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("make", [replayed, captured])
def test_the_parts_together_are_the_batch(make: Any, number: int) -> None:
    batch = make()

    parts = [part_of(batch, index, number) for index in range(number)]

    for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together, getattr(batch, name)), name
    assert [part.batch_size for part in parts] == [BUCKET // number] * number
    assert sum(part.seq_lens_sum for part in parts) == batch.seq_lens_sum


def test_a_batch_without_lengths_on_the_host_has_parts_without_them() -> None:
    batch = replayed()
    batch.seq_lens_cpu = batch.seq_lens_sum = None

    part = part_of(batch, 1, 2)

    assert part.seq_lens_cpu is None
    assert part.seq_lens_sum is None


def test_a_part_is_in_the_memory_of_the_whole() -> None:
    batch = replayed()

    second = part_of(batch, 1, 2)
    batch.seq_lens[3] = 99

    assert int(second.seq_lens[0]) == 99


def test_every_backend_prepares_its_own_part() -> None:
    backends: Any = [Backend(), Backend()]
    attention = SplitAttention(backends)

    attention.init_forward_metadata_out_graph(captured(), in_capture=True)
    attention.init_forward_metadata_in_graph(captured())
    attention.init_forward_metadata_out_graph(replayed())

    for index, backend in enumerate(backends):
        assert [(what, flag) for what, _, flag in backend.seen] == [
            ("out", True),
            ("in", True),
            ("out", False),
        ]
        assert all(batch.positions.tolist()[0] == 10 + 3 * index for _, batch, _ in backend.seen)
    assert attention.get_cuda_graph_seq_len_fill_value() == 1


def test_a_captured_batch_has_children_that_see_the_same_rows_as_their_attention() -> None:
    batch = captured()
    rows = [1] * BUCKET

    children = [make_child(of_graph(batch), rows, part) for part in split(rows, 2)]

    for index, child in enumerate(children):
        part = part_of(batch, index, 2)
        for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc"):
            own, seen = getattr(child, name), getattr(part, name)
            assert own.data_ptr() == seen.data_ptr(), name
            assert own.shape == seen.shape, name
        assert child.mrope_positions.shape == (3, 3)
        assert child.num_token_non_padded is None
