"""Of which kind the exchanges of a step are: what goes in pieces cannot join a round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_afd.attn.announcer import Forecast
from sglang_afd.attn.host_exchange import HostExchange
from sglang_afd.attn.micro_batch import MicroBatch
from sglang_afd.attn.runtime import Runtime
from sglang_afd.attn.status import StatusBoard
from sglang_afd.config import AfdConfig, Role
from sglang_afd.protocol.messages import Dispatch, Kind, StepIntent, Withdrawal
from sglang_afd.transport.base import Rows

MAX_ROWS = 4


class Link:
    """Notes what a real one would send."""

    epoch = 1
    received_ns: dict[int, int] = {}

    def __init__(self) -> None:
        self.headers: list[Dispatch] = []
        self.announced: list[StepIntent | Withdrawal] = []

    def dispatch(self, header: Dispatch, rows: Rows) -> None:
        self.headers.append(header)

    def announce(self, message: StepIntent | Withdrawal) -> None:
        self.announced.append(message)

    def mark_lost(self, reason: str) -> None:
        pass


class Attached:
    """An attacher whose link never goes."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @contextmanager
    def use(self) -> Iterator[None]:
        yield

    def take(self, **limits: float) -> Link:
        return self._link

    def take_now(self) -> Link:
        return self._link


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def runtime(link: Link) -> Runtime:
    config = AfdConfig(
        role=Role.ATTN, mlp_url="http://127.0.0.1:1", max_rows=MAX_ROWS, num_micro_batches="2"
    )
    server_args = SimpleNamespace(watchdog_timeout=300, port=1, device="cpu")
    runtime = Runtime(config, server_args, StatusBoard())
    attached: Any = Attached(link)
    runtime._attacher = attached
    runtime.exchange = HostExchange(attached, MAX_ROWS)
    return runtime


def rows(num_rows: int) -> Rows:
    return Rows(
        hidden_states=torch.zeros(num_rows, 2),
        topk_ids=torch.zeros(num_rows, 1, dtype=torch.int32),
        topk_weights=torch.zeros(num_rows, 1),
    )


@pytest.mark.parametrize(("most_rows", "kind"), [(4, Kind.DECODE), (5, Kind.PREFILL)])
def test_all_exchanges_of_a_step_with_one_in_pieces_are_sent_as_prefill(
    runtime: Runtime, link: Link, most_rows: int, kind: Kind
) -> None:
    with runtime.step(1, Kind.DECODE):
        for index in range(2):
            place = MicroBatch(id=index, number=2, most_rows=most_rows)
            runtime.exchange.send(0, place, rows(4), first_row=0, is_whole=True)

    assert [header.kind for header in link.headers] == [kind, kind]
    assert [(header.micro_batch_id, header.num_micro_batches) for header in link.headers] == [
        (0, 2),
        (1, 2),
    ]


@pytest.mark.parametrize(
    ("num_rows", "kind", "number"),
    [(1, Kind.DECODE, 1), (8, Kind.DECODE, 2), (9, Kind.PREFILL, 2)],
)
def test_a_step_is_announced_as_it_will_be_sent(
    runtime: Runtime, link: Link, num_rows: int, kind: Kind, number: int
) -> None:
    with runtime.step(1, Kind.DECODE):
        runtime.announce(num_rows)
        runtime.announce_next(Forecast(kind=Kind.DECODE, num_rows=num_rows))

    expected = [
        StepIntent(epoch=1, step=step, num_rows=num_rows, num_micro_batches=number, kind=kind)
        for step in (1, 2)
    ]
    assert link.announced == expected


def test_a_prefill_of_unknown_size_is_announced_as_one_micro_batch(
    runtime: Runtime, link: Link
) -> None:
    with runtime.step(1, Kind.DECODE):
        runtime.announce_next(Forecast(kind=Kind.PREFILL, num_rows=0))

    [intent] = link.announced
    assert isinstance(intent, StepIntent)
    assert (intent.kind, intent.num_micro_batches) == (Kind.PREFILL, 1)


def test_steps_are_counted_by_their_number_of_micro_batches(runtime: Runtime) -> None:
    for number in (1, 2, 2, 4):
        with runtime.step(1, Kind.DECODE):
            runtime.num_micro_batches = number
    with runtime.step(1, Kind.DECODE):
        pass

    assert runtime.board.steps() == {"1": 2, "2": 2, "3": 0, "4": 1}
