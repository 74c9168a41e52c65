from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.cuda_ipc import layout
from sglang_afd.transport.cuda_ipc.layout import SlotHeader
from sglang_afd.transport.cuda_ipc.peer_table import PeerTable

RINGS, SEQ, STEP, LAYER, MICRO_BATCH, ROWS = 1, 7, 9, 3, 1, 40
LINE = [RINGS, SEQ, 5, 0, STEP, 0, LAYER, MICRO_BATCH, ROWS, 0, 2]
LATER = [RINGS + 1, SEQ + 1, 5, 0, STEP + 1, 0, LAYER + 1, MICRO_BATCH, ROWS + 2, 0, 2]


@pytest.fixture
def table() -> PeerTable:
    """With one peer of two slots, whose lines are plain memory."""
    lines = np.zeros((2, layout.DOORBELL_LINE_BYTES // 4), np.uint32)
    table = PeerTable.__new__(PeerTable)
    peer: Any = SimpleNamespace(lines=lines, rings=lines[:, 0].copy(), next_seqs={})
    table._peers = {0: peer}
    return table


def ring(table: PeerTable, words: list[int], of: list[int] | None = None) -> None:
    """Write a line; with the sum of other words it is half of one ring and half of another."""
    line = table._peers[0].lines[1]
    line[: len(words)] = words
    line[len(words)] = layout.sum_of_ring(of or words)


def test_a_ring_is_heard_once(table: PeerTable) -> None:
    ring(table, LINE)

    assert table.rung(0) == [
        SlotHeader(
            seq=SEQ,
            epoch=5,
            step=STEP,
            layer_id=LAYER,
            micro_batch_id=MICRO_BATCH,
            num_rows=ROWS,
            kind=Kind.DECODE,
            num_micro_batches=2,
        )
    ]
    assert table.rung(0) == []


@pytest.mark.parametrize("num_new", range(1, len(LATER)))
def test_words_of_two_rings_are_not_taken_for_one(table: PeerTable, num_new: int) -> None:
    for mixed in (LATER[:num_new] + LINE[num_new:], LINE[:num_new] + LATER[num_new:]):
        if mixed not in (LINE, LATER):
            for of in (LINE, LATER):
                ring(table, mixed, of)
                assert table.rung(0) == []

    ring(table, LATER)

    assert [header.seq for header in table.rung(0)] == [SEQ + 1]
