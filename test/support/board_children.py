"""What the tests of the boards run in another process, which must be able to import it."""

from __future__ import annotations

from multiprocessing.synchronize import Event

from sglang_afd.attn.status import LinkState, StatusBoard
from sglang_afd.mlp.board import Board, Counter


def add_rows(board: Board) -> None:
    """Add to one counter and to the second expert."""
    board.words[Counter.ROWS] += 5
    board.words[len(Counter) + 1] += 7


def lose_the_link(board: StatusBoard) -> None:
    """Write one status."""
    board.update(state=LinkState.DETACHED, reason="rank 0 died", num_losses=2)


def count(board: StatusBoard, started: Event, done: Event) -> None:
    """Write statuses of many lengths, whose fields tell of each other."""
    num_losses = 0
    while not done.is_set():
        num_losses += 1
        board.update(num_losses=num_losses, reason=str(num_losses % 10) * (num_losses % 1000))
        started.set()
