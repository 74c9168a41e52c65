"""SIGTERM of an MLP server that has a router: drained by its HTTP process, then stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import pytest

from sglang_afd.mlp import http
from sglang_afd.mlp.board import Board, Counter
from sglang_afd.mlp.server import _StopFlag
from sglang_afd.registrar import drain as drain_module


class HttpProcess:
    """As the loop's process sees it."""

    def __init__(self) -> None:
        self.num_drains = 0
        self.has_drained = False

    def check(self) -> None:
        pass

    def drain(self) -> None:
        self.num_drains += 1

    def is_drained(self) -> bool:
        return self.has_drained


@pytest.fixture
def stop() -> Iterator[Any]:
    """A flag that serves, with SIGTERM and SIGINT as they were afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    flag = _StopFlag()
    yield flag
    for number, handler in before.items():
        signal.signal(number, handler)


def ask(stop: Any) -> bool:
    stop._next_check_s = 0.0
    return bool(stop())


def test_without_a_router_the_loop_stops_at_once(stop: Any) -> None:
    process = HttpProcess()
    stop.watch(process)

    signal.raise_signal(signal.SIGTERM)

    assert stop()
    assert process.num_drains == 0


def test_with_a_router_the_loop_goes_on_until_the_server_is_drained(stop: Any) -> None:
    process = HttpProcess()
    stop.watch(process)
    stop.drain_first()
    assert not stop()

    signal.raise_signal(signal.SIGTERM)
    assert not stop()
    assert process.num_drains == 1
    signal.raise_signal(signal.SIGTERM)
    assert not ask(stop)
    process.has_drained = True

    assert ask(stop)
    assert process.num_drains == 1


def test_an_interrupt_ends_a_drain(stop: Any) -> None:
    stop.watch(HttpProcess())
    stop.drain_first()
    signal.raise_signal(signal.SIGTERM)
    assert not stop()

    signal.raise_signal(signal.SIGINT)

    assert stop()


class Router:
    """A registrar, as far as a drain asks it."""

    def __init__(self, may_stop: bool | None) -> None:
        self.may_stop = may_stop
        self.num_drains = 0

    def drain(self) -> None:
        self.num_drains += 1


@pytest.mark.parametrize(
    ("may_stop", "num_peers", "is_over"),
    [
        (True, 3, True),  # the router knows that they have no requests
        (False, 0, False),
        (None, 0, True),  # no router knows, and nobody is attached
        (None, 3, False),
    ],
)
def test_a_rank_is_drained_when_nobody_needs_it(
    monkeypatch: pytest.MonkeyPatch, may_stop: bool | None, num_peers: int, is_over: bool
) -> None:
    monkeypatch.setattr(drain_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(http, "TURN_S", 0.001)
    board = Board(1)
    board.words[Counter.PEERS] = num_peers
    ours, theirs = Pipe()
    router: Any = Router(may_stop)

    async def test() -> None:
        ending = http._Ending(asyncio.Event(), router, board, theirs, timeout_s=60.0)
        ending.drain()
        ending.drain()
        await asyncio.sleep(0.02)

    asyncio.run(test())

    assert router.num_drains == 1
    assert ours.poll() is is_over
    if is_over:
        assert ours.recv() is http.ToLoop.DRAINED


def test_a_rank_that_somebody_needs_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TURN_S", 0.001)
    ours, theirs = Pipe()
    router: Any = Router(False)

    async def test() -> None:
        http._Ending(asyncio.Event(), router, Board(1), theirs, timeout_s=0.01).drain()
        await asyncio.to_thread(ours.poll, 20)

    asyncio.run(test())

    assert ours.recv() is http.ToLoop.DRAINED
