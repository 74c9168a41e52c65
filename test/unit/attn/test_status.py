from __future__ import annotations

import threading
from multiprocessing import get_context

import board_children
import pytest

from sglang_afd.attn.status import LinkState, Status, StatusBoard


def test_a_new_board_says_starting() -> None:
    assert StatusBoard().read() == Status(state=LinkState.STARTING)


def test_a_change_is_shown_and_the_other_fields_stay() -> None:
    board = StatusBoard()
    board.update(state=LinkState.READY, epoch=2**56 + 1, ranks=({"rank": 0, "boot_id": "ff"},))

    board.update(num_attaches=3)

    assert board.read() == Status(
        state=LinkState.READY,
        epoch=2**56 + 1,
        ranks=({"rank": 0, "boot_id": "ff"},),
        num_attaches=3,
    )


def test_a_shorter_status_leaves_nothing_of_a_longer_one() -> None:
    board = StatusBoard()
    for length in (2000, 10, 0):
        board.update(reason="x" * length)
        board.update(reason="y" * length)

        assert board.read().reason == "y" * length


def test_a_reason_of_any_length_is_shown_as_far_as_it_fits() -> None:
    board = StatusBoard()

    board.update(reason='"\n\u00e9' * 100_000)

    assert board.read().reason.startswith('"\n\u00e9' * 100)


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        StatusBoard().update(nonsense=1)


def test_a_board_written_in_another_process_is_read_here() -> None:
    board = StatusBoard()
    child = get_context("spawn").Process(target=board_children.lose_the_link, args=(board,))
    child.start()
    child.join()

    assert child.exitcode == 0
    assert board.read() == Status(state=LinkState.DETACHED, reason="rank 0 died", num_losses=2)


def test_a_reader_never_sees_half_of_what_another_process_writes() -> None:
    board, context = StatusBoard(), get_context("spawn")
    started, done = context.Event(), context.Event()
    child = context.Process(target=board_children.count, args=(board, started, done))
    child.start()
    started.wait()

    statuses = [board.read() for _ in range(10_000)]
    done.set()
    child.join()

    assert child.exitcode == 0
    for status in statuses:
        assert status.reason == str(status.num_losses % 10) * (status.num_losses % 1000)


def test_two_writing_threads_lose_no_field() -> None:
    board = StatusBoard()
    board.update()
    threads = [
        threading.Thread(target=lambda name=name: [board.update(**{name: n}) for n in range(500)])
        for name in ("num_losses", "num_attaches")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (board.read().num_losses, board.read().num_attaches) == (499, 499)
