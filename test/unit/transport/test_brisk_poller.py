from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from sglang_afd.transport import brisk_poller
from sglang_afd.transport.brisk_poller import HOLD_OFF, BriskPoller

Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of an in-process connection."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as near,
        context.socket(zmq.PAIR) as far,
    ):
        near.bind("inproc://pair")
        far.connect("inproc://pair")
        yield near, far


def test_what_is_readable_is_found_awake_and_asleep(pair: Pair) -> None:
    near, far = pair
    poller = BriskPoller(near)
    far.send(b"x")

    assert poller.poll(1.0, spin_s=1.0) == [(near, zmq.POLLIN)]
    assert poller.poll(1.0, spin_s=0.0) == [(near, zmq.POLLIN)]


def test_nothing_readable_ends_with_the_timeout(pair: Pair) -> None:
    poller = BriskPoller(pair[0])

    assert poller.poll(0.02, spin_s=1.0) == []
    assert poller.poll(0.0, spin_s=1.0) == []


def test_a_slow_yield_stops_the_spinning_for_a_while(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    yields = []
    clock = iter(range(100_000))
    monkeypatch.setattr(brisk_poller.time, "monotonic", lambda: next(clock) * 1.0)
    monkeypatch.setattr(brisk_poller.os, "sched_yield", lambda: yields.append(1))
    poller = BriskPoller(pair[0])

    for _ in range(1 + HOLD_OFF):
        poller.poll(0.001, spin_s=10.0)
    assert len(yields) == 1

    poller.poll(0.001, spin_s=10.0)
    assert len(yields) == 2
