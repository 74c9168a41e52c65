"""Ties a process's life to its parent's."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PARENT = "SGLANG_AFD_PARENT_PID"  # for spawned children, which start too late to ask


def announce_as_parent() -> None:
    """Let children that this process spawns know whose they are."""
    os.environ[_PARENT] = str(os.getpid())


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when its parent ends, however it ends.

    A parent that has ended before this call is noticed, too, if it announced itself.
    """
    parent = int(os.environ.get(_PARENT, os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
