"""The HTTP process as the loop's process sees it: started first, told of the load, watched."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

from sglang_afd.errors import AfdError
from sglang_afd.mlp import http
from sglang_afd.mlp.board import Board

POLL_S = 0.2
STOP_S = 8.0  # its goodbye to a router takes up to 5 s


class HttpProcess:
    """Started at once; ends with this process, however that ends.

    Args:
        listener: Bound; closed here, since the HTTP process has its own.
        board: Written here and read there.
        options: Who this server is.
    """

    def __init__(self, listener: socket.socket, board: Board, options: http.HttpOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=http.serve, args=(listener, board, options, theirs), name="mlp-http", daemon=True
        )
        self._process.start()
        theirs.close()
        listener.close()

    def wait_for_rank(self, should_stop: Callable[[], bool]) -> int | None:
        """Until a rank is found for a server that asks first; None when told to stop before."""
        while not should_stop():
            if self._pipe.poll(POLL_S):
                try:
                    rank: int = self._pipe.recv()
                except EOFError:
                    self._process.join(STOP_S)
                    continue  # `should_stop` finds it dead
                return rank
        return None

    def serve(self, info: dict[str, Any], exchange_address: str) -> None:
        """Tell it that the experts are loaded."""
        try:
            self._pipe.send(http.Serving(info=info, exchange_address=exchange_address))
        except BrokenPipeError:
            self._process.join(STOP_S)
            self.check()

    def drain(self) -> None:
        """Tell it that this server was asked to end."""
        self._tell(http.FromLoop.DRAIN)

    def is_drained(self) -> bool:
        """Has it said since that this server may end?"""
        try:
            return self._pipe.poll() and self._pipe.recv() is http.ToLoop.DRAINED
        except (EOFError, OSError):
            self._process.join(STOP_S)
            return False  # `check` finds it dead

    def check(self) -> None:
        """Is it alive?

        Raises:
            AfdError: No.
        """
        if not self._process.is_alive():
            raise AfdError(f"the HTTP process ended with exit code {self._process.exitcode}")

    def stop(self) -> None:
        """End it."""
        self._tell(http.FromLoop.STOP)
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()

    def _tell(self, word: http.FromLoop) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._pipe.send(word)
