"""When a server that was asked to end may do so."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_afd.registrar.drain import SETTLE_S, Drain


class Router:
    """A registrar, as far as a drain asks it."""

    def __init__(self, may_stop: bool | None) -> None:
        self.may_stop = may_stop
        self.was_told = False

    def drain(self) -> None:
        self.was_told = True


class Bench:
    def __init__(self, may_stop: bool | None, *, is_idle: bool = True) -> None:
        self.now_s = 100.0
        self.is_idle = is_idle
        self.router: Any = Router(may_stop)
        self.drain = Drain(self.router, lambda: self.is_idle, 30.0, clock=lambda: self.now_s)

    def is_over(self, after_s: float) -> bool:
        self.now_s += after_s
        return self.drain.is_over()


def test_the_router_is_told_at_once() -> None:
    assert Bench(None).router.was_told


@pytest.mark.parametrize("may_stop", [True, None])
def test_an_idle_server_waits_for_requests_that_were_on_their_way(may_stop: bool | None) -> None:
    bench = Bench(may_stop)

    assert not bench.is_over(SETTLE_S - 0.01)
    assert bench.is_over(0.01)


def test_a_busy_server_finishes_first() -> None:
    bench = Bench(True, is_idle=False)
    assert not bench.is_over(10)

    bench.is_idle = True

    assert bench.is_over(0)


def test_a_server_that_the_router_still_needs_goes_on() -> None:
    bench = Bench(False)
    assert not bench.is_over(29)

    bench.router.may_stop = True

    assert bench.is_over(0)


@pytest.mark.parametrize("may_stop", [True, False, None])
def test_no_drain_takes_longer_than_allowed(may_stop: bool | None) -> None:
    bench = Bench(may_stop, is_idle=False)

    assert not bench.is_over(29.9)
    assert bench.is_over(0.1)
