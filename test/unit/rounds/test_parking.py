"""How long a round is patient with those that are missing, by what was measured."""

from __future__ import annotations

import pytest

from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.parking import Patience

OPTIONS = RoundOptions()
MS = 1e-3
LAYERS = 8


def make_patience(*peers: str, turn_s: float = MS, num_turns: int = 40) -> Patience:
    """That of peers whose rounds and turns have been short."""
    patience = Patience(OPTIONS, LAYERS)
    patience.measured_round(LAYERS * turn_s)
    for peer in peers:
        measure(patience, peer, turn_s, num_turns)
    return patience


def measure(patience: Patience, peer: str, turn_s: float, num_turns: int) -> None:
    for _ in range(num_turns):
        patience.measured_turn(peer, turn_s)


def test_short_rounds_and_turns_leave_the_least_patience() -> None:
    patience = make_patience("a", "b")

    assert patience.park_s("ab") == OPTIONS.min_park_s


@pytest.mark.parametrize("turn_s", [15 * MS, 60 * MS, 1.0])
def test_turns_that_became_long_raise_it_within_a_step_though_no_round_ended(turn_s: float) -> None:
    patience = make_patience("a", "b")

    for peer in "ab":
        measure(patience, peer, turn_s, 12)

    assert patience.park_s("ab") > 1.5 * turn_s


def test_it_is_never_more_than_the_turns_of_four_layers_where_rounds_are_short() -> None:
    patience = make_patience("a", "b")

    for peer in "ab":
        measure(patience, peer, 60 * MS, 1000)

    assert patience.park_s("ab") == pytest.approx(4 * 60 * MS)


def test_it_shrinks_again_with_the_turns() -> None:
    patience = make_patience("a", "b")
    for peer in "ab":
        measure(patience, peer, 60 * MS, 40)
    grown_s = patience.park_s("ab")

    for peer in "ab":
        measure(patience, peer, MS, 32)

    assert grown_s > 200 * MS
    assert patience.park_s("ab") == OPTIONS.min_park_s


def test_a_hang_of_everybody_at_most_doubles_it_and_not_for_long() -> None:
    patience = make_patience("a", "b", turn_s=10 * MS, num_turns=200)
    usual_s = patience.park_s("ab")

    for peer in "ab":
        patience.measured_turn(peer, 3600.0)
    raised_s = patience.park_s("ab")
    for peer in "ab":
        measure(patience, peer, 10 * MS, 30)

    assert usual_s < raised_s <= 2 * usual_s
    assert patience.park_s("ab") == pytest.approx(usual_s, rel=0.05)


@pytest.mark.parametrize("others", ["a", "ab", "abd"])
def test_one_peer_that_is_far_slower_raises_it_for_nobody(others: str) -> None:
    patience = make_patience(*others)

    measure(patience, "c", 1.0, 1000)

    assert patience.park_s(others + "c") == OPTIONS.min_park_s


def test_peers_that_are_in_no_step_do_not_count() -> None:
    patience = make_patience("a", "b", *"idle")

    for peer in "ab":
        measure(patience, peer, 60 * MS, 40)

    assert patience.park_s("abidle") == OPTIONS.min_park_s
    assert patience.park_s("ab") > 200 * MS


def test_turns_of_a_peer_that_is_gone_are_forgotten() -> None:
    patience = make_patience("a")
    measure(patience, "a", 60 * MS, 40)

    patience.forget("a")

    assert patience.park_s("a") == OPTIONS.min_park_s


def test_until_a_round_has_ended_slow_turns_ask_for_more_than_the_first_patience() -> None:
    patience = Patience(OPTIONS, LAYERS)
    before_s = patience.park_s("ab")

    for peer in "ab":
        measure(patience, peer, 3.0, 40)

    assert before_s == OPTIONS.first_park_s
    assert patience.park_s("ab") == pytest.approx(12.0, rel=0.1)
