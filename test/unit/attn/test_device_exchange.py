"""What a step tells its slots, without a GPU: a slab that notes each call in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_afd.attn import runtime
from sglang_afd.attn.device_exchange import DeviceExchange
from sglang_afd.attn.exchange import Step
from sglang_afd.attn.launch_limit import LaunchLimit
from sglang_afd.attn.micro_batch import Slice, run_in_turns
from sglang_afd.attn.remote_moe import RemoteDispatcher
from sglang_afd.errors import StallTimeout
from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.cuda_ipc.layout import EVERY_ROW
from sglang_afd.upstream.moe import StandardTopKOutput

FIRST_LAYER, LAYER, MAX_ROWS, H, K = 3, 5, 4, 2, 2


class Slab:
    """Answers each exchange with its hidden states, doubled, in memory that it uses again."""

    def __init__(self) -> None:
        self.replies = [torch.full((MAX_ROWS, H), torch.nan) for _ in range(2)]
        self.dispatched: list[dict[str, Any]] = []
        self.staged: list[dict[str, Any]] = []

    def stage_step(self, **words: Any) -> None:
        self.staged.append(words)

    def dispatch(
        self,
        slot: int,
        layer_id: int,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        first_row: int = 0,
        rings: bool,
    ) -> None:
        assert topk_ids.dtype == torch.int32
        assert topk_weights.dtype == torch.float32
        assert all(rows.is_contiguous() for rows in (hidden_states, topk_ids, topk_weights))
        self.replies[slot][: len(hidden_states)] = hidden_states * 2
        self.dispatched.append(
            {
                "slot": slot,
                "layer_id": layer_id,
                "num_rows": len(hidden_states),
                "first_row": first_row,
                "rings": rings,
            }
        )

    def combine(self, slot: int, num_rows: int) -> Tensor:
        return self.replies[slot][:num_rows]


class Attacher:
    """Somebody is attached, or nobody."""

    def __init__(self) -> None:
        self.is_attached = True
        self.limits: list[dict[str, float]] = []

    def take(self, **limits: float) -> None:
        self.limits.append(limits)
        if not self.is_attached:
            raise StallTimeout("nobody")


class Guard:
    """A step was given up, or not."""

    def __init__(self) -> None:
        self.reason = ""

    def check(self) -> None:
        if self.reason:
            raise StallTimeout(self.reason)


class Side:
    """It is its own runtime."""

    def __init__(self) -> None:
        self.slab, self.attacher, self.guard = Slab(), Attacher(), Guard()
        self.is_capturing = False
        self.num_marks = 0
        parts: list[Any] = [self.attacher, self.guard, self.slab]
        self.exchange = DeviceExchange(
            *parts,
            max_rows=MAX_ROWS,
            is_capturing=lambda: self.is_capturing,
            limit=LaunchLimit(self._mark),
        )

    def _mark(self) -> Callable[[], bool]:
        self.num_marks += 1
        return lambda: True

    def run_layer(self, hidden_states: Tensor, layer_id: int = LAYER) -> Tensor:
        num_rows = len(hidden_states)
        ids = torch.zeros(num_rows, K, dtype=torch.int64)
        topk = StandardTopKOutput(
            torch.ones(num_rows, K, dtype=torch.float64), ids, torch.zeros(num_rows, 6)
        )
        dispatcher = RemoteDispatcher(layer_id)
        return dispatcher.combine(dispatcher.dispatch(hidden_states, topk))


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    side = Side()
    monkeypatch.setattr(runtime, "_current", side)
    yield side


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize(("num_rows", "pieces"), [(1, [1]), (4, [4]), (5, [4, 1]), (9, [4, 4, 1])])
def test_rows_come_back_in_order_in_pieces_where_they_do_not_fit(
    side: Side, num_rows: int, pieces: list[int], is_capturing: bool
) -> None:
    side.is_capturing = is_capturing
    rows = torch.randn(num_rows, H)

    total = side.run_layer(rows)

    assert torch.equal(total, rows * 2)
    assert [call["num_rows"] for call in side.slab.dispatched] == pieces
    assert [call["first_row"] for call in side.slab.dispatched] == [
        sum(pieces[:index]) for index in range(len(pieces))
    ]


@pytest.mark.parametrize(("is_capturing", "num_marks"), [(False, 3), (True, 0)])
def test_eager_exchanges_count_against_the_limit_of_launches_and_captured_ones_do_not(
    side: Side, is_capturing: bool, num_marks: int
) -> None:
    side.is_capturing = is_capturing

    side.run_layer(torch.randn(MAX_ROWS, H))
    side.run_layer(torch.randn(MAX_ROWS + 1, H))

    assert side.num_marks == num_marks


def test_zero_rows_exchange_nothing(side: Side) -> None:
    assert side.run_layer(torch.empty(0, H)).shape == (0, H)
    assert side.slab.dispatched == []


def test_an_eager_sum_outlives_its_slot_and_a_captured_one_is_the_slot(side: Side) -> None:
    first = side.run_layer(torch.ones(2, H))
    side.is_capturing = True
    second = side.run_layer(torch.ones(2, H) * 3)

    assert torch.equal(first, torch.full((2, H), 2.0))
    assert second.data_ptr() == side.slab.replies[0].data_ptr()


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("layer_id", [FIRST_LAYER, LAYER])
@pytest.mark.parametrize("num_rows", [2, 5])
def test_the_doorbell_rings_for_every_exchange(
    side: Side, is_capturing: bool, layer_id: int, num_rows: int
) -> None:
    side.is_capturing = is_capturing

    side.run_layer(torch.ones(num_rows, H), layer_id)

    assert {call["rings"] for call in side.slab.dispatched} == {True}


def test_micro_batches_have_slots_of_their_own_and_know_where_their_rows_begin(side: Side) -> None:
    rows = torch.randn(4, H)

    sums = run_in_turns(
        [
            Slice(
                num_rows=2,
                forward=lambda part=part: side.run_layer(part),  # type: ignore[misc]
                context=None,
                first_row=first_row,
            )
            for first_row, part in ((0, rows[:2]), (2, rows[2:]))
        ]
    )

    assert torch.equal(torch.cat(sums), rows * 2)
    assert [(call["slot"], call["first_row"]) for call in side.slab.dispatched] == [(0, 0), (1, 2)]


@pytest.mark.parametrize(
    ("num_rows", "most_rows", "rows_told", "kind"),
    [
        (3, 3, 3, Kind.DECODE),
        (None, MAX_ROWS, EVERY_ROW, Kind.DECODE),
        (None, MAX_ROWS + 1, EVERY_ROW, Kind.PREFILL),
    ],
)
def test_a_step_is_told_before_its_forward(
    side: Side, num_rows: int | None, most_rows: int, rows_told: int, kind: Kind
) -> None:
    side.exchange.begin(Step(number=7, kind=Kind.DECODE, deadline_s=99.0))

    side.exchange.stage(Kind.DECODE, number=2, num_rows=num_rows, most_rows=most_rows)

    assert side.slab.staged == [
        {"step": 7, "kind": kind, "num_micro_batches": 2, "num_rows": rows_told}
    ]


def test_no_step_begins_while_nobody_is_attached_or_after_one_was_given_up(side: Side) -> None:
    step = Step(number=1, kind=Kind.DECODE, deadline_s=99.0)
    side.exchange.begin(step)
    assert side.attacher.limits[0]["limit_s"] == 99.0

    side.attacher.is_attached = False
    with pytest.raises(StallTimeout, match="nobody"):
        side.exchange.begin(step)
    side.attacher.is_attached, side.guard.reason = True, "given up"
    with pytest.raises(StallTimeout, match="given up"):
        side.exchange.begin(step)
