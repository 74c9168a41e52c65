"""Progress of a build on standard error: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]


class Progress(Protocol):
    """Called as work advances; done runs from 0 to total."""

    def __call__(self, done: int, total: int, what: str) -> None: ...


class ConsoleProgress:
    """Progress for people; a new kind of work starts a new bar.

    Args:
        stream: Where to write; standard error by default, so that standard output stays the
            program's own.
    """

    LINES = 5  # plain lines per kind of work, besides the first

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._what = ""
        self._bar: tqdm | None = None
        self._last_line = -1

    def __call__(self, done: int, total: int, what: str) -> None:
        if what != self._what:
            self._start(total, what)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif done * self.LINES // total > self._last_line:
            self._last_line = done * self.LINES // total
            self._stream.write(f"{what}: {done}/{total}\n")
            self._stream.flush()
        if done == total:
            self._close()

    def _start(self, total: int, what: str) -> None:
        self._close()
        self._what = what
        self._last_line = -1
        if self._stream.isatty():
            self._bar = tqdm(total=total, desc=what, unit="part", file=self._stream)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def silent(done: int, total: int, what: str) -> None:
    """Progress for tests and programs that want none."""
