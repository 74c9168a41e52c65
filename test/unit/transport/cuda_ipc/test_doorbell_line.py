from __future__ import annotations

import numpy as np
import pytest

from sglang_afd.protocol.messages import Dispatch, Kind
from sglang_afd.transport.cuda_ipc import layout
from sglang_afd.transport.cuda_ipc.doorbells import Doorbells

RINGS, SEQ, STEP, LAYER, MICRO_BATCH, ROWS = 1, 7, 9, 3, 1, 40
LINE = [RINGS, SEQ, 5, 0, STEP, 0, LAYER, MICRO_BATCH, ROWS, 0, 2]
LATER = [RINGS + 1, SEQ + 1, 5, 0, STEP + 1, 0, LAYER + 1, MICRO_BATCH, ROWS + 2, 0, 2]


class Page:
    """Doorbells of two slots on plain memory."""

    def __init__(self) -> None:
        memory = bytearray(layout.DOORBELL_BYTES)
        self.words = np.frombuffer(memory, np.uint32)
        self.doorbells = Doorbells(memoryview(memory), 2)

    def ring(self, words: list[int], of: list[int] | None = None) -> None:
        """Write a line; with the sum of other words it is half of one ring and half of another."""
        line = self.words[layout.DOORBELL_LINE_BYTES // 4 :]
        line[: len(words)] = words
        line[len(words)] = layout.sum_of_ring(of or words)


@pytest.fixture
def page() -> Page:
    return Page()


def test_a_ring_is_heard_once(page: Page) -> None:
    page.ring(LINE)

    assert page.doorbells.rung() == [
        Dispatch(
            epoch=5,
            step=STEP,
            layer_id=LAYER,
            micro_batch_id=MICRO_BATCH,
            num_rows=ROWS,
            kind=Kind.DECODE,
            num_micro_batches=2,
        )
    ]
    assert not page.doorbells.rung()
    assert page.doorbells.seq_of_next(MICRO_BATCH, is_served=False) == SEQ


@pytest.mark.parametrize("num_new", range(1, len(LATER)))
def test_words_of_two_rings_are_not_taken_for_one(page: Page, num_new: int) -> None:
    for mixed in (LATER[:num_new] + LINE[num_new:], LINE[:num_new] + LATER[num_new:]):
        if mixed not in (LINE, LATER):
            for of in (LINE, LATER):
                page.ring(mixed, of)
                assert not page.doorbells.rung()

    page.ring(LATER)

    assert [header.layer_id for header in page.doorbells.rung()] == [LAYER + 1]
