from __future__ import annotations

from sgl_router_afd.dataplane import counters
from sgl_router_afd.dataplane.counters import RelayCounters, SharedCounters


def test_totals_are_the_sums_over_all_relay_processes() -> None:
    shared = SharedCounters.create(3)
    for relay in range(3):
        own = RelayCounters(shared, relay)
        own.add(counters.CHUNKS, 10**relay)
        own.add(counters.IN_FLIGHT + 1, relay)

    assert shared.total(counters.CHUNKS) == 111
    assert shared.totals(counters.IN_FLIGHT, 3) == [0, 3, 0]


def test_another_mapping_of_the_same_memory_sees_every_count() -> None:
    shared = SharedCounters.create(2)
    other = SharedCounters(shared.descriptor, 2)

    RelayCounters(other, 1).add(counters.SERVED + counters.MAX_SERVERS - 1, 5)
    other.take_turn(3)
    other.take_turn(5)

    assert shared.total(counters.SERVED + counters.MAX_SERVERS - 1) == 5
    assert (shared.turns[3], shared.turns[5]) == (1, 2)


def test_a_relay_that_died_has_nothing_running_and_keeps_what_it_counted() -> None:
    shared = SharedCounters.create(2)
    for relay in range(2):
        own = RelayCounters(shared, relay)
        for cell in (counters.RUNNING, counters.HELD, counters.IN_FLIGHT, counters.SERVED):
            own.add(cell)

    shared.forget_running(1)

    assert shared.total(counters.RUNNING) == shared.total(counters.HELD) == 1
    assert shared.total(counters.IN_FLIGHT) == 1
    assert shared.total(counters.SERVED) == 2


def test_a_time_to_the_first_byte_is_counted_in_its_bucket() -> None:
    shared = SharedCounters.create(1)
    own = RelayCounters(shared, 0)
    edges = counters.FIRST_BYTE_BUCKETS_S

    for seconds in (0.0, edges[0], edges[0] + 1e-9, edges[-1] + 1):
        own.add_first_byte(seconds)

    counts = shared.totals(counters.FIRST_BYTE_BUCKET, len(edges) + 1)
    assert counts == [2, 1] + [0] * (len(edges) - 2) + [1]
    assert shared.total(counters.FIRST_BYTE_US) == int(1e6 * (2 * edges[0] + edges[-1] + 1))


def test_times_to_the_first_token_are_summed_by_server() -> None:
    shared = SharedCounters.create(2)
    for relay in range(2):
        RelayCounters(shared, relay).add_first_token(3, 0.25)

    assert shared.total(counters.TTFT_COUNT + 3) == 2
    assert shared.total(counters.TTFT_SUM_US + 3) == 500_000
    assert shared.total(counters.TTFT_COUNT + 2) == 0
