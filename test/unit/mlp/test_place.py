from __future__ import annotations

import time

import pytest

from sglang_afd.mlp.board import Board, Counter, State
from sglang_afd.mlp.facts import Name
from sglang_afd.mlp.group import RENEW_S, START_GRACE_S, MemberReport
from sglang_afd.mlp.http import HttpOptions, make_place
from sglang_afd.mlp.membership import TIMEOUT_S
from sglang_afd.mlp.place import LOOP_AGE_LIMIT_S, NO_RANK, Place


def place_of(rank: int, *leader_urls: str) -> tuple[Place, Board]:
    report = MemberReport(
        rank=rank,
        ep_size=2,
        boot_id="boot",
        fingerprint="ab",
        exchange_address="",
        sent_at_s=0.0,
    )
    board = Board(1)
    name = Name(server_id="mlp", url="http://main", peer_urls=leader_urls, num_experts=2)
    options = HttpOptions(info={}, report=report, leader_urls=leader_urls, secret=b"", name=name)
    return make_place(board, options), board


def turn(board: Board, age_s: float = 0.0) -> None:
    board.words[Counter.STATE] = State.SERVING
    board.words[Counter.TURNED_AT_NS] = time.monotonic_ns() - int(age_s * 1e9)


def test_a_rank_is_not_well_before_it_serves() -> None:
    place, board = place_of(1, "http://main")
    assert place.state() == ("loading", "loading the experts of rank 1")
    assert not place.is_well()

    place.serve({}, "ipc:///run/1")
    assert place.state() == ("stalled", "not serving") and not place.is_well()

    turn(board)
    assert place.state() == ("ready", "") and place.is_well()


def test_a_spare_is_well_while_it_waits_and_while_it_loads() -> None:
    place, board = place_of(NO_RANK, "http://main")
    assert place.state()[0] == "spare" and place.is_well()

    place.wait("no rank is free")
    assert place.state() == ("spare", "no rank is free")

    place.take(1)
    assert place.state()[0] == "loading" and place.is_well()

    turn(board)
    place.serve({}, "ipc:///run/1")
    assert place.state() == ("ready", "")


def test_a_spare_that_leads_keeps_a_register_from_before_it_serves() -> None:
    place, board = place_of(NO_RANK, "http://main")
    place.lead(is_successor=True)
    assert place.group is not None
    assert (place.group.loading(), place.group.missing()) == ([0], [0, 1])

    place.serve({}, "ipc:///run/0")

    assert (place.group.loading(), place.group.missing()) == ([], [1])
    assert place.group.members()[0].exchange_address == "ipc:///run/0"


def test_rank_0_leads_at_once_only_where_nobody_can_have_taken_its_place() -> None:
    alone, _ = place_of(0)
    one_of_many, _ = place_of(0, "http://main", "http://spare")

    assert alone.group is not None and alone.rank == 0
    assert one_of_many.group is None and one_of_many.rank == NO_RANK


def test_a_rank_whose_place_is_taken_says_so_and_is_left_alone() -> None:
    place, board = place_of(1, "http://main")
    place.serve({}, "ipc:///run/1")
    turn(board)

    place.refusal = "refused by http://main: rank 1 is already served by ipc:///run/s"

    assert place.state() == ("displaced", place.refusal)
    assert place.is_well()


@pytest.mark.parametrize("waited", [False, True])
def test_a_loop_that_hangs_is_not_well_whoever_it_was(waited: bool) -> None:
    place, board = place_of(NO_RANK if waited else 1, "http://main")
    place.take(1)
    place.serve({}, "ipc:///run/1")

    turn(board, age_s=LOOP_AGE_LIMIT_S + 1)

    state, reason = place.state()
    assert state == "stalled" and "the loop last turned 61 s ago" in reason
    assert not place.is_well()


def test_only_a_successor_gives_the_others_less_than_the_time_of_a_start() -> None:
    first, _ = place_of(0)
    successor, _ = place_of(NO_RANK, "http://main")
    successor.lead(is_successor=True)

    assert first.group is not None and successor.group is not None
    assert first.group.grace_left_s() == pytest.approx(START_GRACE_S, abs=30)
    assert successor.group.grace_left_s() < START_GRACE_S / 2


def test_a_successor_gives_a_rank_the_time_to_ask_a_predecessor_that_hangs() -> None:
    successor, _ = place_of(NO_RANK, "http://main")

    successor.lead(is_successor=True)

    assert successor.group is not None
    assert successor.group.grace_left_s() > TIMEOUT_S + RENEW_S
