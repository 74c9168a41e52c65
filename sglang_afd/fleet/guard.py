"""The launcher's side of the guardian process."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Self

from sglang_afd.fleet import guardian


class Guard:
    """A guardian for as long as the `with` block runs.

    A parent-death signal would reach a server, but not the processes that the server is starting; a
    process group holds them all.
    """

    def __init__(self) -> None:
        # A session of its own keeps it out of reach of the terminal's Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Killed, not told to finish: the groups are gone, and their numbers may be somebody else's.
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None, "the guardian's input is a pipe"
        self._process.stdin.close()

    def watch(self, process_group: int) -> None:
        """Have this group killed should the launcher die without stopping it."""
        assert self._process.stdin is not None, "the guardian's input is a pipe"
        self._process.stdin.write(f"{process_group}\n")
        self._process.stdin.flush()
