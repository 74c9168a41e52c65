"""What the dispatcher of a remote MoE layer sends, without a server: zero rows, and many pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sglang_afd.attn import runtime
from sglang_afd.attn.micro_batch import MicroBatch
from sglang_afd.attn.remote_moe import RemoteDispatcher
from sglang_afd.transport.base import Rows
from sglang_afd.upstream.moe import StandardTopKOutput


class EchoExchange:
    """Answers each dispatch with its hidden states, doubled; it is its own runtime."""

    max_rows = 3

    def __init__(self) -> None:
        self.sent: list[tuple[int, Rows]] = []
        self.micro_batches: set[MicroBatch] = set()
        self.places: list[tuple[int, bool]] = []
        self.exchange = self

    def send(
        self, layer_id: int, micro_batch: MicroBatch, rows: Rows, *, first_row: int, is_whole: bool
    ) -> None:
        self.sent.append((layer_id, rows))
        self.micro_batches.add(micro_batch)
        self.places.append((first_row, is_whole))

    def receive(self, micro_batch: MicroBatch, num_rows: int, *, is_whole: bool) -> Tensor:
        sent = self.sent[-1][1].hidden_states
        assert (num_rows, is_whole) == (len(sent), self.places[-1][1])
        return sent * 2


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[EchoExchange]:
    """Installed as this process's runtime."""
    echo = EchoExchange()
    monkeypatch.setattr(runtime, "_current", echo)
    yield echo


def exchange(num_rows: int) -> tuple[Tensor, Tensor]:
    hidden_states = torch.randn(num_rows, 4)
    ids = torch.zeros(num_rows, 2, dtype=torch.int64)
    topk = StandardTopKOutput(torch.ones(num_rows, 2), ids, torch.zeros(num_rows, 6))
    dispatcher = RemoteDispatcher(layer_id=5)
    return hidden_states, dispatcher.combine(dispatcher.dispatch(hidden_states, topk))


def test_zero_rows_exchange_nothing(echo: EchoExchange) -> None:
    _, total = exchange(0)

    assert total.shape == (0, 4)
    assert echo.sent == []


@pytest.mark.parametrize(("num_rows", "pieces"), [(1, [1]), (3, [3]), (4, [3, 1]), (7, [3, 3, 1])])
def test_rows_beyond_a_slot_go_in_pieces_and_come_back_in_order(
    echo: EchoExchange, num_rows: int, pieces: list[int]
) -> None:
    hidden_states, total = exchange(num_rows)

    assert torch.equal(total, hidden_states * 2)
    assert [len(rows.hidden_states) for _, rows in echo.sent] == pieces
    assert {layer_id for layer_id, _ in echo.sent} == {5}
    assert all(rows.topk_ids.dtype == torch.int32 for _, rows in echo.sent)
    assert echo.places == [(sum(pieces[:index]), len(pieces) == 1) for index in range(len(pieces))]
    assert echo.micro_batches == {MicroBatch(id=0, number=1, most_rows=num_rows)}
