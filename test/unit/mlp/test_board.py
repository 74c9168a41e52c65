from __future__ import annotations

import time
from multiprocessing import get_context

import board_children
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_afd.mlp.board import Board, Counter, State
from sglang_afd.mlp.board_metrics import render


def samples(board: Board) -> dict[tuple[str, str], float]:
    text = render(board, rank=1, first_expert=4).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["rank"] == "1"
            found[sample.name, sample.labels.get("expert", "")] = sample.value
    return found


@pytest.fixture
def board() -> Board:
    """Every word differs from every other."""
    board = Board(3)
    board.words[:] = range(1, len(Counter) + 4)
    return board


def test_a_new_board_is_all_zero_and_loading() -> None:
    board = Board(2)

    assert set(board.read().values()) == {0}
    assert board.read()[Counter.STATE] == State.LOADING
    assert board.rows_per_expert() == [0, 0]


def test_a_word_is_read_where_it_was_written(board: Board) -> None:
    assert board.read() == {counter: counter + 1 for counter in Counter}
    assert board.rows_per_expert() == [len(Counter) + 1, len(Counter) + 2, len(Counter) + 3]


def test_the_age_is_the_time_since_the_last_turn() -> None:
    board = Board(1)
    board.words[Counter.TURNED_AT_NS] = time.monotonic_ns() - 5_000_000_000

    assert 5 <= board.age_s() < 60


def test_a_board_is_shared_with_another_process(board: Board) -> None:
    child = get_context("spawn").Process(target=board_children.add_rows, args=(board,))
    child.start()
    child.join()

    assert child.exitcode == 0
    assert board.read()[Counter.ROWS] == Counter.ROWS + 6
    assert board.rows_per_expert()[1] == len(Counter) + 2 + 7


def test_every_counter_is_scraped_under_its_own_name(board: Board) -> None:
    expected = {
        "exchanges_total": Counter.EXCHANGES,
        "failed_exchanges_total": Counter.FAILED,
        "refused_messages_total": Counter.REFUSED,
        "attaches_total": Counter.ATTACHES,
        "lost_peers_total": Counter.LOST_PEERS,
        "expert_runs_total": Counter.RUNS,
        "rows_total": Counter.ROWS,
        "decode_rows_total": Counter.DECODE_ROWS,
        "prefill_rows_total": Counter.PREFILL_ROWS,
        "attached_peers": Counter.PEERS,
        "waiting_exchanges": Counter.WAITING,
    }

    found = samples(board)

    assert {name: found["sglang_afd_mlp_" + name, ""] for name in expected} == {
        name: counter + 1 for name, counter in expected.items()
    }


def test_times_are_scraped_in_seconds() -> None:
    board = Board(1)
    board.words[Counter.WAIT_NS] = 1_500_000_000
    board.words[Counter.RUN_NS] = 2_000_000_000
    board.words[Counter.REPLY_NS] = 250_000_000

    found = samples(board)

    assert found["sglang_afd_mlp_wait_seconds_total", ""] == 1.5
    assert found["sglang_afd_mlp_expert_run_seconds_total", ""] == 2.0
    assert found["sglang_afd_mlp_reply_seconds_total", ""] == 0.25


def test_rows_are_scraped_by_the_models_expert_numbers(board: Board) -> None:
    found = samples(board)

    by_expert = {
        expert: value
        for (name, expert), value in found.items()
        if name == "sglang_afd_mlp_expert_rows_total"
    }
    assert by_expert == {
        "4": len(Counter) + 1,
        "5": len(Counter) + 2,
        "6": len(Counter) + 3,
    }


def test_every_counter_but_the_state_is_scraped(board: Board) -> None:
    num_per_rank = sum(1 for _, expert in samples(board) if not expert)

    assert num_per_rank == len(Counter) - 1
