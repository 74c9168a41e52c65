"""The rules of the rounds, one by one."""

from __future__ import annotations

import pytest
from round_bench import MS, Bench

from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.rounds import Rounds

LAYERS = 10


def make_bench(*peers: str, options: RoundOptions | None = None) -> Bench:
    return Bench(Rounds(range(LAYERS), options), *peers)


def make_steady_bench(peers: str, num_steps: int = 6) -> Bench:
    """Peers that have decoded together for some steps; the next step is `num_steps` + 1."""
    bench = make_bench(*peers)
    for peer in peers:
        bench.announces(peer, 1)
    for step in range(1, num_steps + 1):
        bench.step(peers, LAYERS, step=step)
    return bench


def rounds_of(bench: Bench) -> Rounds:
    assert isinstance(bench.source, Rounds)
    return bench.source


def walk(bench: Bench, peers: str, layers: range, *, step: int) -> None:
    for layer_id in layers:
        for peer in peers:
            bench.arrives(peer, layer_id, step=step)
        assert bench.peers() == sorted(peers), f"layer {layer_id}"


# Commit at arrival


def test_an_announced_step_alone_starts_nothing() -> None:
    bench = make_bench("a", "b")
    bench.announces("a", 1)
    bench.announces("b", 1)

    assert bench.runs() is None
    assert rounds_of(bench).awaited == []


def test_a_peer_that_was_only_announced_is_not_waited_for_in_the_layers() -> None:
    bench = make_bench("a", "b")
    bench.announces("b", 1)
    bench.arrives("a")
    bench.passes(1.0)

    walk_first = bench.peers()
    bench.arrives("a", 1)

    assert (walk_first, bench.peers()) == (["a"], ["a"])


def test_a_single_peer_is_never_held_back() -> None:
    bench = make_bench("a")
    for step in (1, 2, 3):
        bench.announces("a", step + 1)
        bench.step("a", LAYERS, step=step)

    assert rounds_of(bench).counters.windows == 0


# One round in flight, whose members are waited for everywhere


def test_a_late_peer_waits_for_the_end_of_the_round() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a")
    bench.runs()
    bench.arrives("b")
    bench.passes(5 * MS)

    assert bench.runs() is None
    walk(bench, "a", range(1, LAYERS), step=1)
    bench.passes(0.05)
    assert bench.peers() == ["b"]


def test_members_are_waited_for_at_every_layer() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a")
    bench.arrives("b")
    bench.runs()
    bench.arrives("a", 1)

    before = bench.peers()
    bench.arrives("b", 1)

    assert (before, bench.peers()) == ([], ["a", "b"])


def test_unequal_micro_batches_share_the_units_that_both_have() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a", parts=1)
    bench.arrives("b", parts=2)
    bench.arrives("b", part=1, parts=2)

    units = [bench.peers(), bench.peers()]
    bench.arrives("a", 1)
    bench.arrives("b", 1, parts=2)

    assert [*units, bench.peers()] == [["a", "b"], ["b"], ["a", "b"]]


def test_a_second_micro_batch_is_waited_for_before_the_next_layer() -> None:
    bench = make_bench("a")
    bench.arrives("a", parts=2)
    bench.runs()

    assert bench.runs() is None
    assert rounds_of(bench).awaited == [("a", 0, 1)]


def test_rows_of_a_micro_batch_may_be_none() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a", rows=0)
    bench.arrives("b", rows=4)

    unit = bench.runs()

    assert unit is not None
    assert (len(unit.members), unit.num_rows) == (2, 4)


# The window


def test_the_window_begins_at_the_end_of_the_last_round_not_at_an_arrival() -> None:
    bench = make_steady_bench("abc")  # gaps of 2.2 ms
    ended = bench.now - 0.2 * MS
    bench.passes(2 * MS)
    bench.arrives("a", step=7)
    bench.arrives("b", step=7)

    held = bench.runs()
    wake = bench.source.wake_at_s(bench.now)

    assert held is None
    assert wake is not None
    # By now mean + 4 deviations of a steady gap is a few milliseconds, and far below the cap.
    assert 2.2 * MS < wake - ended < 8 * MS


def test_a_round_starts_as_soon_as_everybody_expected_is_there() -> None:
    bench = make_steady_bench("abc")
    bench.passes(2 * MS)
    for peer in "abc":
        bench.arrives(peer, step=7)

    assert bench.peers() == ["a", "b", "c"]
    assert rounds_of(bench).counters.vain_windows == 0


def test_a_peer_waited_for_in_vain_is_not_waited_for_again_until_it_shows_up() -> None:
    bench = make_steady_bench("abc")
    bench.passes(2 * MS)
    bench.arrives("a", step=7)
    bench.arrives("b", step=7)
    assert bench.runs() is None
    bench.passes(20 * MS)
    walk(bench, "", range(0), step=7)
    assert bench.peers() == ["a", "b"]
    walk(bench, "ab", range(1, LAYERS), step=7)

    bench.step("ab", LAYERS, step=8)  # without waiting
    bench.passes(2 * MS)
    bench.arrives("c", step=7)
    bench.arrives("a", step=9)
    assert bench.runs() is None  # for b
    bench.arrives("b", step=9)

    assert bench.peers() == ["a", "b", "c"]
    assert rounds_of(bench).counters.vain_windows == 1


def test_a_withdrawn_peer_is_not_waited_for() -> None:
    bench = make_steady_bench("ab")
    bench.announces("b", 7)
    bench.source.withdrawn("b", bench.now)
    bench.passes(2 * MS)
    bench.arrives("a", step=7)

    assert bench.peers() == ["a"]


def test_what_is_said_of_the_step_after_the_next_does_not_hide_the_next() -> None:
    """An overlap scheduler launches a step while the one before it has not sent its rows."""
    for say in (
        lambda bench: bench.announces("b", 8, is_prefill=True),
        lambda bench: bench.source.withdrawn("b", bench.now, 8),
    ):
        bench = make_steady_bench("ab")
        bench.announces("b", 7)
        say(bench)
        bench.arrives("a", step=7)
        alone = bench.source.next_unit(bench.now)
        bench.arrives("b", step=7)

        assert (alone, bench.peers()) == (None, ["a", "b"])


def test_a_withdrawal_that_comes_before_the_last_step_counts_after_it() -> None:
    bench = make_bench("a", "b")
    bench.announces("b", 1)
    bench.source.withdrawn("b", bench.now, 2)
    bench.arrives("a")
    bench.arrives("b")
    walk(bench, "ab", range(LAYERS), step=1)
    bench.passes(MS)
    bench.arrives("a", step=2)

    assert bench.peers() == ["a"]


def test_a_withdrawal_during_the_last_step_counts_after_it() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a")
    bench.arrives("b")
    bench.runs()
    bench.source.withdrawn("b", bench.now)
    walk(bench, "ab", range(1, LAYERS), step=1)
    bench.passes(MS)
    bench.arrives("a", step=2)

    assert bench.peers() == ["a"]


def test_a_peer_whose_next_step_is_a_prefill_is_not_waited_for() -> None:
    bench = make_steady_bench("ab")
    bench.announces("b", 7, is_prefill=True)
    bench.passes(2 * MS)
    bench.arrives("a", step=7)

    assert bench.peers() == ["a"]


def test_a_peer_in_the_middle_of_a_prefill_is_not_waited_for_though_it_announced_decode() -> None:
    bench = make_steady_bench("ab")
    bench.passes(2 * MS)
    bench.arrives("b", step=7, is_prefill=True)
    bench.announces("b", 8)
    assert bench.peers() == ["b"]
    bench.arrives("a", step=7)

    assert bench.peers() == ["a"]


def test_a_peer_whose_prefill_has_ended_is_waited_for_again() -> None:
    bench = make_steady_bench("ab")
    bench.passes(2 * MS)
    bench.announces("b", 8)
    for layer_id in range(LAYERS):
        bench.arrives("b", layer_id, step=7, is_prefill=True)
        bench.runs()
    bench.arrives("a", step=7)

    assert bench.runs() is None
    bench.arrives("b", step=8)
    assert bench.peers() == ["a", "b"]


def test_a_peer_without_intents_is_waited_for_after_its_decode_step() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a")
    bench.arrives("b")
    walk_peers = [bench.peers()]
    walk(bench, "ab", range(1, LAYERS), step=1)
    bench.passes(MS)
    bench.arrives("a", step=2)

    assert walk_peers == [["a", "b"]]
    assert bench.runs() is None
    assert rounds_of(bench).expected == ["b"]


def test_a_late_intent_for_a_step_that_is_over_makes_nobody_wait() -> None:
    bench = make_steady_bench("ab")
    bench.source.withdrawn("b", bench.now)
    bench.announces("b", 6)
    bench.passes(2 * MS)
    bench.arrives("a", step=7)

    assert bench.peers() == ["a"]


def test_the_cap_bounds_the_wait_for_a_peer_that_was_never_seen() -> None:
    bench = make_bench("a", "b")
    bench.announces("b", 1)
    bench.arrives("a")

    held = bench.runs()
    wake = bench.source.wake_at_s(bench.now)

    assert held is None
    assert wake == pytest.approx(bench.now + 0.020)


def test_the_cap_grows_where_the_gaps_of_most_peers_are_longer() -> None:
    bench = make_bench("a", "b", "c")
    for step in range(1, 12):
        bench.passes(60 * MS)
        for layer_id in range(LAYERS):
            for peer in "abc":
                bench.arrives(peer, layer_id, step=step)
            bench.runs()
    bench.passes(40 * MS)
    bench.arrives("a", step=12)
    bench.arrives("b", step=12)

    held = bench.runs()
    bench.passes(25 * MS)
    bench.arrives("c", step=12)

    assert held is None
    assert bench.peers() == ["a", "b", "c"]


def test_a_night_without_requests_is_no_host_gap() -> None:
    bench = make_steady_bench("ab")
    for peer in "ab":
        bench.source.withdrawn(peer, bench.now)
    bench.passes(10 * 3600.0)
    asked = bench.runs(), bench.source.wake_at_s(bench.now)
    for peer in "ab":
        bench.announces(peer, 7)
    bench.step("ab", LAYERS, step=7, gap_s=0.0)
    ended = bench.now
    bench.passes(2 * MS)
    bench.arrives("a", step=8)

    held = bench.runs()
    wake = bench.source.wake_at_s(bench.now)

    assert asked == (None, None)
    assert held is None
    assert wake is not None
    assert wake - ended < 8 * MS


# Parking and boarding


def make_half_parked_bench() -> Bench:
    """a, b and c are at layer 4; c has hung for so long that the others went on."""
    bench = make_steady_bench("abc")
    bench.passes(2 * MS)
    for peer in "abc":
        bench.arrives(peer, step=7)
    bench.runs()
    walk(bench, "abc", range(1, 4), step=7)
    bench.arrives("a", 4, step=7)
    bench.arrives("b", 4, step=7)
    assert bench.runs() is None
    wake = bench.source.wake_at_s(bench.now)
    assert wake is not None
    # Half of a round of 10 layers and 1.2 ms each, at least 10 ms.
    assert wake - bench.now == pytest.approx(10 * MS, abs=MS)
    bench.now = wake
    assert bench.peers() == ["a", "b"]
    return bench


def test_a_member_that_holds_up_half_of_the_round_is_parked() -> None:
    bench = make_half_parked_bench()

    assert rounds_of(bench).counters.split == 1
    assert rounds_of(bench).counters.parked_peers == 1


def test_a_parked_peer_that_comes_with_a_prefill_is_parked_no_longer() -> None:
    bench = make_half_parked_bench()
    bench.arrives("c", step=8, rows=1000, is_prefill=True)

    bench.runs()

    assert rounds_of(bench).counters.parked_peers == 0


def test_a_parked_peer_boards_a_later_round_at_its_layer() -> None:
    bench = make_half_parked_bench()
    walk(bench, "ab", range(5, 8), step=7)
    bench.arrives("c", 4, step=7)
    bench.passes(MS)
    assert bench.runs() is None  # no round of its own
    walk(bench, "ab", range(8, LAYERS), step=7)
    bench.passes(2 * MS)
    for peer in "ab":
        bench.arrives(peer, step=8)
    assert bench.peers() == ["a", "b"]  # c is in its step, and is not waited for
    walk(bench, "ab", range(1, 4), step=8)
    for peer in "ab":
        bench.arrives(peer, 4, step=8)

    assert bench.peers() == ["a", "b", "c"]
    assert rounds_of(bench).counters.merged == 1
    assert rounds_of(bench).counters.parked_peers == 0


def test_a_boarded_peer_is_waited_for_like_all() -> None:
    bench = make_half_parked_bench()
    walk(bench, "ab", range(5, LAYERS), step=7)
    bench.arrives("c", 4, step=7)
    bench.passes(2 * MS)
    for layer_id in range(5):
        for peer in "ab":
            bench.arrives(peer, layer_id, step=8)
        bench.runs()
    bench.arrives("a", 5, step=8)
    bench.arrives("b", 5, step=8)

    assert bench.runs() is None
    bench.arrives("c", 5, step=7)
    assert bench.peers() == ["a", "b", "c"]


def test_a_parked_peer_does_not_start_a_round_while_one_is_about_to_form() -> None:
    bench = make_half_parked_bench()
    walk(bench, "ab", range(5, LAYERS), step=7)
    bench.passes(0.5 * MS)
    bench.arrives("c", 4, step=7)

    assert bench.runs() is None  # the host gaps of a and b


def test_a_parked_peer_goes_on_alone_when_nobody_else_comes() -> None:
    bench = make_half_parked_bench()
    walk(bench, "ab", range(5, LAYERS), step=7)
    for peer in "ab":
        bench.source.withdrawn(peer, bench.now)
    bench.arrives("c", 4, step=7)

    assert bench.peers() == ["c"]
    walk(bench, "c", range(5, LAYERS), step=7)


def test_one_early_member_does_not_throw_out_the_others() -> None:
    bench = make_steady_bench("abc")
    bench.passes(2 * MS)
    for peer in "abc":
        bench.arrives(peer, step=7)
    bench.runs()
    bench.arrives("a", 1, step=7)
    bench.passes(11 * MS)
    assert bench.runs() is None
    bench.arrives("b", 1, step=7)
    bench.passes(5 * MS)
    assert bench.runs() is None
    bench.arrives("c", 1, step=7)

    assert bench.peers() == ["a", "b", "c"]


def test_a_round_that_hangs_as_a_whole_does_not_hold_up_a_newcomer_for_ever() -> None:
    bench = make_steady_bench("ab")
    bench.passes(2 * MS)
    bench.source.withdrawn("b", bench.now)
    bench.arrives("a", step=7)
    bench.runs()
    bench.arrives("b", step=7)  # a says nothing any more
    held = bench.runs()
    wake = bench.source.wake_at_s(bench.now)
    assert wake is not None

    bench.now = wake

    assert held is None
    assert bench.peers() == ["b"]


# What patience learns from turns


def patience_with_b(bench: Bench, layer_id: int, *, step: int, parts: int = 1) -> float:
    """How long the round of a and b waits for b at a layer."""
    bench.arrives("a", layer_id, step=step, parts=parts)
    assert bench.runs() is None
    wake = bench.source.wake_at_s(bench.now)
    assert wake is not None
    return wake - bench.now


def walk_slowly(bench: Bench, layers: range, *, step: int) -> None:
    for layer_id in layers:
        bench.passes(60 * MS)
        walk(bench, "ab", range(layer_id, layer_id + 1), step=step)


def test_a_round_that_has_become_slow_is_more_patient_before_it_ends() -> None:
    bench = make_steady_bench("ab")

    walk_slowly(bench, range(9), step=7)

    assert patience_with_b(bench, 9, step=7) > 100 * MS


def test_the_turns_of_idle_peers_do_not_make_others_impatient() -> None:
    bench = make_steady_bench("abcde")
    for peer in "cde":
        bench.source.withdrawn(peer, bench.now)

    walk_slowly(bench, range(9), step=7)

    assert patience_with_b(bench, 9, step=7) > 100 * MS


def test_a_peer_that_attaches_anew_has_no_turns_of_its_former_self() -> None:
    bench = make_steady_bench("ab")
    walk_slowly(bench, range(9), step=7)
    for epoch, peer in enumerate("ab", start=3):
        bench.source.peer_attached(peer, epoch, bench.now)
    walk(bench, "ab", range(1), step=8)

    assert patience_with_b(bench, 1, step=8) == pytest.approx(10 * MS)


def test_host_gaps_are_no_turns() -> None:
    bench = Bench(Rounds(range(2)), "a", "b")
    for step in range(1, 30):
        bench.passes(100 * MS)
        for layer_id in range(2):
            for part in range(2):
                for peer in "ab":
                    bench.arrives(peer, layer_id, part, step=step, parts=2)
            assert [bench.peers(), bench.peers()] == [["a", "b"], ["a", "b"]]
    for part in range(2):
        for peer in "ab":
            bench.arrives(peer, 0, part, step=30, parts=2)
    assert [bench.peers(), bench.peers()] == [["a", "b"], ["a", "b"]]

    assert patience_with_b(bench, 1, step=30, parts=2) == pytest.approx(10 * MS, abs=MS)


# Out of place


def test_a_peer_that_attached_in_the_middle_of_its_step_boards_where_it_is() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a")
    bench.runs()
    bench.arrives("b", 2, step=90)  # its pending exchange, sent again
    bench.arrives("a", 1)
    bench.runs()
    bench.arrives("a", 2)

    assert bench.peers() == ["a", "b"]
    walk(bench, "a", range(0), step=1)
    bench.arrives("a", 3)
    assert bench.runs() is None
    bench.arrives("b", 3, step=90)
    assert bench.peers() == ["a", "b"]


def test_a_peer_that_attached_in_the_middle_of_its_step_goes_on_when_it_is_alone() -> None:
    bench = make_bench("a")
    bench.arrives("a", 5, step=90)

    assert bench.peers() == ["a"]
    walk(bench, "a", range(6, LAYERS), step=90)


def test_the_second_piece_of_a_cut_exchange_is_run_alone() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a")
    bench.arrives("b")
    bench.runs()
    bench.arrives("b")
    bench.arrives("a", 1)

    assert bench.peers() == ["b"]
    assert bench.runs() is None
    bench.arrives("b", 1)
    assert bench.peers() == ["a", "b"]
    assert rounds_of(bench).counters.one_exchange_runs == 1


def test_a_peer_that_skips_layers_holds_up_nobody() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a")
    bench.arrives("b")
    bench.runs()
    bench.arrives("a", 1)
    bench.arrives("b", 3)

    assert bench.peers() == ["a"]
    bench.arrives("a", 2)
    assert bench.peers() == ["a"]
    bench.arrives("a", 3)
    assert bench.peers() == ["a", "b"]


def test_a_peer_that_starts_its_step_anew_leaves_the_round() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a")
    bench.arrives("b")
    bench.runs()
    bench.arrives("b", 0, step=50)
    bench.arrives("a", 1)

    assert bench.peers() == ["a"]


def test_the_same_message_twice_is_one_exchange() -> None:
    bench = make_bench("a")
    bench.arrives("a")
    bench.arrives("a")
    bench.runs()

    assert bench.runs() is None
    assert rounds_of(bench).counters.repeated == 1


def test_a_peer_that_dies_holds_up_nobody() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a")
    bench.arrives("b")
    bench.runs()
    bench.arrives("a", 1)
    held = bench.runs()

    bench.source.peer_gone("b", bench.now)

    assert held is None
    assert bench.peers() == ["a"]


def test_a_peer_may_die_while_its_unit_runs() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a")
    bench.arrives("b")
    unit = bench.source.next_unit(bench.now)
    assert unit is not None
    bench.source.peer_gone("b", bench.now)

    bench.source.finished(unit, bench.now)
    bench.arrives("a", 1)

    assert bench.peers() == ["a"]


def test_rows_of_a_peer_that_is_not_attached_are_ignored() -> None:
    bench = make_bench("a")
    bench.arrives("stranger")

    assert bench.runs() is None


# Numbers


def test_sequence_numbers_count_decode_units_only() -> None:
    bench = make_bench("a", "b")
    bench.arrives("b", is_prefill=True)
    bench.runs()
    walk(bench, "a", range(2), step=1)

    assert [unit.sequence for unit in bench.units] == [0, 1, 2]


def test_counters_show_peers_and_rows_of_a_unit() -> None:
    bench = make_bench("a", "b")
    bench.arrives("a", rows=3)
    bench.arrives("b", rows=4)
    bench.runs()
    bench.arrives("a", 1, rows=3)
    bench.arrives("b", 1, rows=4)
    bench.runs()

    counters = rounds_of(bench).counters

    assert (counters.units, counters.unit_peers, counters.unit_rows) == (2, 4, 14)
    assert counters.rounds == 1


def test_asking_again_while_nothing_happens_says_nothing_new() -> None:
    bench = make_bench("a", "b")
    bench.announces("b", 1)
    bench.arrives("a")

    answers = {bench.source.next_unit(bench.now) for _ in range(3)}

    assert answers == {None}
    assert rounds_of(bench).counters.windows == 0
    bench.passes(1.0)
    assert bench.peers() == ["a"]
    assert rounds_of(bench).counters.windows == 1
