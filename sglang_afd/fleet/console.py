"""What the launcher tells people: servers' lines under their names, and its own progress."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from sglang_afd.files import send_nowhere

COLOURS = (36, 33, 35, 32, 34, 31)  # ANSI foregrounds, one per server in order of appearance


class Console:
    """Writes progress and servers' output to standard error, answers to standard output.

    Args:
        quiet: Whether to leave out what the servers print.
        log: Where progress and servers' output go; standard error by default.
        out: Where answers go; standard output by default.
    """

    def __init__(
        self, *, quiet: bool, log: TextIO | None = None, out: TextIO | None = None
    ) -> None:
        self._quiet = quiet
        self._log = log or sys.stderr
        self._out = out or sys.stdout
        # A process that was started without standard streams has None for them.
        self._is_coloured = bool(self._log) and self._log.isatty() and "NO_COLOR" not in os.environ
        self._colours: dict[str, int] = {}

    def server_line(self, name: str, line: str) -> None:
        """Show one line of a server's output."""
        if not self._quiet:
            self._write(f"{self._prefix(name)} {line}")

    def progress(self, text: str) -> None:
        """Say how far the launcher is."""
        self._write(text)

    def answer(self, text: str) -> None:
        """Pass on a piece of a model's answer as it arrives."""
        _put(self._out, text)

    def _prefix(self, name: str) -> str:
        if not self._is_coloured:
            return f"{name} |"
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        return f"\x1b[{colour}m{name} |\x1b[0m"

    def _write(self, line: str) -> None:
        _put(self._log, line + "\n")


def _put(stream: TextIO | None, text: str) -> None:
    """Write at once; text for nobody, a reader that is gone, or a full disk is lost.

    Nothing of that is raised: what stops the servers in order writes, too.
    """
    if stream is None:
        return
    try:
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError:
        send_nowhere(stream)
