"""Ties a process's life to its parent's."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when its parent ends, however it ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), number)
