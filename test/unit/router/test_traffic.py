from __future__ import annotations

import pytest
from fake_loop import FakeLoop

from sgl_router_afd.dataplane.counters import (
    FAILED,
    IN_FLIGHT,
    SERVED,
    RelayCounters,
    SharedCounters,
)
from sgl_router_afd.slots import COOL_S
from sgl_router_afd.traffic import NO_TRAFFIC, WINDOW_S, TrafficBook

A, B = ("a", "http://a:1"), ("b", "http://b:1")


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def shared() -> SharedCounters:
    return SharedCounters.create(2)


@pytest.fixture
def book(shared: SharedCounters, loop: FakeLoop) -> TrafficBook:
    return TrafficBook(shared, loop.time)


def test_the_traffic_of_a_server_is_that_of_all_relays(
    shared: SharedCounters, book: TrafficBook
) -> None:
    book.slots.take([A, B], 0.0)
    for relay in (0, 1):
        RelayCounters(shared, relay).add(IN_FLIGHT + 1, 2)
        RelayCounters(shared, relay).add(SERVED + 1, 3)
    RelayCounters(shared, 0).add(FAILED + 1)

    traffic = book.of("b")

    assert (traffic.num_in_flight, traffic.num_served, traffic.num_failed) == (4, 6, 1)
    assert book.num_in_flight("b") == 4
    assert book.of("nobody") == NO_TRAFFIC


def test_the_time_to_first_token_is_the_mean_of_the_last_ten_seconds(
    shared: SharedCounters, book: TrafficBook, loop: FakeLoop
) -> None:
    relay = RelayCounters(shared, 0)
    book.slots.take([A], 0.0)
    relay.add_first_token(0, 9.0)
    sample_for_a_window(book, loop)
    relay.add_first_token(0, 0.1)
    relay.add_first_token(0, 0.3)

    recent = book.of("a").ttft_s
    sample_for_a_window(book, loop)
    later = book.of("a").ttft_s

    assert recent == pytest.approx(0.2)
    assert later is None


def sample_for_a_window(book: TrafficBook, loop: FakeLoop) -> None:
    for _ in range(int(WINDOW_S) + 2):
        loop.advance(1.0)
        book.sample()


def test_the_next_owner_of_a_slot_starts_with_zeros(shared: SharedCounters, loop: FakeLoop) -> None:
    book = TrafficBook(shared, loop.time)
    relay = RelayCounters(shared, 0)
    book.slots._num = 1
    book.slots.take([A], 0.0)
    relay.add(SERVED, 7)
    relay.add(FAILED, 2)
    book.slots.take([], 0.0)

    book.slots.take([B], COOL_S)
    relay.add(SERVED)

    assert (book.of("b").num_served, book.of("b").num_failed) == (1, 0)
