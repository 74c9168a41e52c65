"""How many requests clients wait for, as the HTTP side sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OpenRequests:
    """Counts from the request's head to the end of its answer; any thread."""

    def __init__(self) -> None:
        self._num_open = 0
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around one request."""
        with self._lock:
            self._num_open += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1

    def count(self) -> int:
        """Now."""
        return self._num_open
