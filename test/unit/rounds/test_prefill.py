"""Prefill beside the rounds: pieces, their size, their order and their age."""

from __future__ import annotations

import pytest
from round_bench import MS, Bench

from sglang_afd.rounds.counters import RoundCounters
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.prefill import PrefillQueue
from sglang_afd.rounds.rounds import Rounds
from sglang_afd.rounds.units import Unit

LAYERS = 10
OPTIONS = RoundOptions(first_piece_rows=100)


def make_bench(*peers: str) -> Bench:
    return Bench(Rounds(range(LAYERS), OPTIONS), *peers)


def counters_of(bench: Bench) -> RoundCounters:
    assert isinstance(bench.source, Rounds)
    return bench.source.counters


def pieces_of(bench: Bench) -> list[tuple[int, int, bool]]:
    return [
        (unit.first_row, unit.num_rows, unit.is_last_piece)
        for unit in bench.units
        if unit.is_prefill
    ]


def start_decode(bench: Bench, peer: str) -> None:
    """`peer` is aboard a round, and its next rows are not here."""
    bench.arrives(peer)
    assert bench.peers() == [peer]


def test_a_prefill_runs_at_once_and_whole_when_nobody_decodes() -> None:
    bench = make_bench("a", "p")
    bench.arrives("p", rows=2500, is_prefill=True)

    bench.runs()

    assert pieces_of(bench) == [(0, 2500, True)]
    assert bench.runs() is None


def test_a_prefill_goes_in_pieces_while_somebody_decodes() -> None:
    bench = make_bench("a", "p")
    start_decode(bench, "a")
    bench.arrives("p", rows=250, is_prefill=True)

    for _ in range(3):
        bench.runs(run_s=0)  # so that nothing is measured

    assert pieces_of(bench) == [(0, 100, False), (100, 100, False), (200, 50, True)]


def test_a_prefill_does_not_wait_for_a_round_that_waits() -> None:
    bench = make_bench("a", "p")
    start_decode(bench, "a")
    bench.arrives("p", rows=50, is_prefill=True)

    unit = bench.runs()

    assert unit is not None
    assert unit.is_prefill


def test_a_young_prefill_lets_decode_go_first() -> None:
    bench = make_bench("a", "p")
    start_decode(bench, "a")
    bench.arrives("p", rows=50, is_prefill=True)
    bench.arrives("a", 1)

    assert [bench.peers(), bench.peers()] == [["a"], ["p"]]


def test_an_old_prefill_goes_before_decode() -> None:
    bench = make_bench("a", "p")
    start_decode(bench, "a")
    bench.arrives("p", rows=50, is_prefill=True)
    bench.arrives("a", 1)
    bench.passes(1.5 * MS)

    assert [bench.peers(), bench.peers()] == [["p"], ["a"]]


def test_at_most_one_piece_goes_between_two_decode_units_that_are_ready() -> None:
    bench = make_bench("a", "p")
    start_decode(bench, "a")
    bench.arrives("p", rows=1000, is_prefill=True)
    bench.passes(2 * MS)

    ran = []
    for layer_id in range(1, 5):
        bench.arrives("a", layer_id)
        ran += [bench.peers(run_s=0)[0], bench.peers(run_s=0)[0]]

    assert ran == ["p", "a"] * 4


def test_prefills_are_served_in_the_order_in_which_they_came() -> None:
    bench = make_bench("a", "p", "q")
    start_decode(bench, "a")
    bench.arrives("q", rows=150, is_prefill=True)
    bench.arrives("p", rows=150, is_prefill=True)

    ran = [bench.peers(run_s=0)[0] for _ in range(4)]

    assert ran == ["q", "q", "p", "p"]


def test_the_pieces_of_a_peer_that_died_are_not_run() -> None:
    bench = make_bench("a", "p")
    start_decode(bench, "a")
    bench.arrives("p", rows=250, is_prefill=True)
    bench.runs()

    bench.source.peer_gone("p", bench.now)

    assert bench.runs() is None


def test_the_rest_of_a_prefill_that_was_declined_is_not_run() -> None:
    bench = make_bench("a", "p")
    start_decode(bench, "a")
    member = bench.arrives("p", rows=250, is_prefill=True)
    bench.runs()

    bench.source.declined(member, bench.now)

    assert bench.runs() is None


def test_a_prefill_without_rows_is_answered() -> None:
    bench = make_bench("p")
    bench.arrives("p", rows=0, is_prefill=True)

    bench.runs()

    assert pieces_of(bench) == [(0, 0, True)]


def make_measured_queue(*, decode_s: float, piece_rows: int, piece_s: float) -> PrefillQueue:
    bench = make_bench("a", "p")
    start_decode(bench, "a")
    for layer_id in range(1, LAYERS):
        bench.arrives("p", layer_id, rows=piece_rows, is_prefill=True)
        bench.runs(run_s=piece_s)
        bench.arrives("a", layer_id)
        bench.runs(run_s=decode_s)
    source = bench.source
    assert isinstance(source, Rounds)
    return source._prefill


@pytest.mark.parametrize(
    ("decode_s", "piece_rows", "piece_s", "rows"),
    [
        (1 * MS, 100, 1 * MS, 200),
        (2 * MS, 100, 1 * MS, 400),
        (1 * MS, 100, 10 * MS, 64),  # never below the least
    ],
)
def test_a_piece_takes_the_time_of_two_decode_units(
    decode_s: float, piece_rows: int, piece_s: float, rows: int
) -> None:
    queue = make_measured_queue(decode_s=decode_s, piece_rows=piece_rows, piece_s=piece_s)

    # The first decode unit took 1 ms.
    assert queue.piece_rows == pytest.approx(rows, rel=0.2)


def test_the_age_of_prefill_is_counted() -> None:
    bench = make_bench("a", "p")
    start_decode(bench, "a")
    bench.arrives("p", rows=150, is_prefill=True)
    bench.passes(3 * MS)
    bench.runs()
    bench.passes(2 * MS)
    bench.runs()

    counters = counters_of(bench)

    assert (counters.prefill_pieces, counters.prefill_rows) == (2, 150)
    assert counters.max_prefill_age_s == pytest.approx(3 * MS)
    assert counters.prefill_age_s == pytest.approx(5 * MS)


def test_a_run_that_is_not_the_last_that_was_handed_out_is_not_measured() -> None:
    queue = PrefillQueue(OPTIONS, RoundCounters())
    early = Unit(layer_id=0, members=(), sequence=1)
    late = Unit(layer_id=1, members=(), sequence=2)
    queue.decode_goes(early, 0.0)
    queue.decode_goes(late, 0.1)

    queue.finished(early, 5.0)

    assert queue.piece_rows == OPTIONS.first_piece_rows
