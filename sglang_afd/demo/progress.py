"""Progress of a build on standard error: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]


class Progress(Protocol):
    """Called as work advances; done runs from 0 to total."""

    def __call__(self, done: int, total: int, what: str) -> None: ...


class ConsoleProgress:
    """Progress for people.

    Args:
        stream: Where to write; standard error by default, so that standard output stays the
            program's own.
    """

    LINES = 5  # plain lines per build, besides the first

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: tqdm | None = None
        self._last_line = -1

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._stream.isatty():
            self._draw(done, total, what)
        elif done * self.LINES // total > self._last_line:
            self._last_line = done * self.LINES // total
            self._stream.write(f"{what}: {done}/{total}\n")
            self._stream.flush()

    def _draw(self, done: int, total: int, what: str) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc=what, unit="part", file=self._stream)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()


def silent(done: int, total: int, what: str) -> None:
    """Progress for tests and programs that want none."""
