"""A rank that follows: the leader's sequence, and its own prefill between."""

from __future__ import annotations

from round_bench import Bench

from sglang_afd.rounds.follower import FollowerQueue
from sglang_afd.rounds.orders import OrderedMember, UnitOrder, order_of
from sglang_afd.rounds.units import Member, Unit

A, B = 1, 2  # epochs, in the order in which the bench attaches


def make_bench() -> Bench:
    return Bench(FollowerQueue(), "a", "b")


def queue_of(bench: Bench) -> FollowerQueue:
    assert isinstance(bench.source, FollowerQueue)
    return bench.source


def order(sequence: int, layer_id: int, *epochs: int, part: int = 0, step: int = 1) -> UnitOrder:
    return UnitOrder(
        sequence=sequence,
        layer_id=layer_id,
        micro_batch_id=part,
        members=tuple(
            OrderedMember(epoch=epoch, micro_batch_id=part, step=step, num_rows=3)
            for epoch in epochs
        ),
    )


def test_rows_that_nobody_ordered_are_not_run() -> None:
    bench = make_bench()
    bench.arrives("a")

    assert bench.runs() is None
    assert bench.source.wake_at_s(bench.now) is None


def test_a_unit_waits_for_the_rows_of_all_its_members() -> None:
    bench = make_bench()
    queue_of(bench).ordered(order(1, 0, A, B))
    bench.arrives("a")

    held = bench.runs()
    awaited = queue_of(bench).awaited
    bench.arrives("b")

    assert held is None
    assert awaited == [("b", 0, 0)]
    assert bench.peers() == ["a", "b"]


def test_units_run_in_the_order_of_the_leader_though_later_ones_are_ready() -> None:
    bench = make_bench()
    queue_of(bench).ordered(order(1, 0, A))
    queue_of(bench).ordered(order(2, 0, B))
    bench.arrives("b")

    held = bench.runs()
    bench.arrives("a")

    assert held is None
    assert [bench.peers(), bench.peers()] == [["a"], ["b"]]
    assert [unit.sequence for unit in bench.units] == [1, 2]


def test_a_member_that_came_and_went_is_skipped() -> None:
    bench = make_bench()
    queue_of(bench).ordered(order(1, 0, A, B))
    bench.arrives("a")
    held = bench.runs()

    bench.source.peer_gone("b", bench.now)

    assert held is None
    assert bench.peers() == ["a"]


def test_a_unit_all_of_whose_members_are_gone_is_skipped() -> None:
    bench = make_bench()
    bench.source.peer_gone("b", bench.now)
    queue_of(bench).ordered(order(1, 0, B))
    queue_of(bench).ordered(order(2, 0, A))
    bench.arrives("a")

    assert bench.peers() == ["a"]
    assert [unit.sequence for unit in bench.units] == [2]


def test_a_peer_that_attached_again_is_not_taken_for_its_former_self() -> None:
    bench = make_bench()
    bench.source.peer_gone("a", bench.now)
    bench.source.peer_attached("a again", 7, bench.now)
    bench.arrives("a again")
    queue_of(bench).ordered(order(1, 0, A))

    before = bench.runs()
    queue_of(bench).ordered(order(2, 0, 7))

    assert before is None
    assert bench.peers() == ["a again"]


def test_an_exchange_that_its_peer_gave_up_is_skipped() -> None:
    bench = make_bench()
    bench.arrives("a", 5)
    bench.arrives("a", 0, step=2)
    queue_of(bench).ordered(order(1, 5, A))
    queue_of(bench).ordered(order(2, 0, A, step=2))

    assert bench.peers() == ["a"]
    assert [unit.sequence for unit in bench.units] == [2]


def test_an_order_that_came_before_says_nothing_new() -> None:
    bench = make_bench()
    queue_of(bench).ordered(order(1, 0, A))
    queue_of(bench).ordered(order(1, 0, A))
    bench.arrives("a")

    assert [bench.peers(), bench.peers()] == [["a"], []]
    assert queue_of(bench).counters.repeated == 1


def test_the_same_message_twice_is_one_exchange() -> None:
    bench = make_bench()
    bench.arrives("a")
    bench.arrives("a")
    queue_of(bench).ordered(order(1, 0, A))

    assert [bench.peers(), bench.peers()] == [["a"], []]


def test_a_new_leader_begins_its_own_sequence() -> None:
    bench = make_bench()
    queue_of(bench).ordered(order(8, 0, A))

    queue_of(bench).leader_changed(bench.now)
    queue_of(bench).ordered(order(1, 0, B))
    bench.arrives("b")

    assert bench.peers() == ["b"]


def test_prefill_goes_while_a_unit_waits() -> None:
    bench = make_bench()
    queue_of(bench).ordered(order(1, 0, A))
    bench.arrives("b", rows=100, is_prefill=True)

    assert bench.peers() == ["b"]


def test_prefill_is_cut_while_others_decode_and_whole_otherwise() -> None:
    bench = make_bench()
    queue_of(bench).ordered(order(1, 0, A))
    bench.arrives("a")
    bench.runs()
    bench.arrives("b", rows=1000, is_prefill=True)
    cut = [unit.num_rows for unit in (bench.runs(run_s=0), bench.runs(run_s=0)) if unit]
    bench.passes(10.0)
    bench.arrives("b", 1, rows=1000, is_prefill=True)

    whole = bench.runs()

    assert cut == [512, 488]
    assert whole is not None
    assert whole.num_rows == 1000


def test_an_order_names_what_the_leader_runs() -> None:
    members = tuple(
        Member(peer=peer, micro_batch_id=1, step=step, layer_id=6, num_rows=rows)
        for peer, step, rows in (("x", 4, 2), ("y", 9, 0))
    )
    unit = Unit(layer_id=6, members=members, sequence=12, micro_batch_id=1, num_rows=2)

    assert order_of(unit, {"x": 30, "y": 31, "z": 32}) == UnitOrder(
        sequence=12,
        layer_id=6,
        micro_batch_id=1,
        members=(
            OrderedMember(epoch=30, micro_batch_id=1, step=4, num_rows=2),
            OrderedMember(epoch=31, micro_batch_id=1, step=9, num_rows=0),
        ),
    )
