"""Keeps an eager step from running so far ahead that CUDA's queue of launches fills up.

A step that waits for MLP servers stands still while its host goes on launching. Some thousand
kernels later a launch blocks until the step goes on; were it to keep other threads from launching,
too, nobody could attach again or give the step up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

MOST_AHEAD = 8  # exchanges; some twenty kernels each, of the thousand that a queue holds
LOOK_S = 50e-6  # between two looks; short beside that many layers

IsReached = Callable[[], bool]


def mark_stream() -> IsReached:
    """Mark this place in torch's current stream; the result tells whether the GPU has got there."""
    event = torch.cuda.Event()
    event.record()
    return event.query


class LaunchLimit:
    """Called once for each exchange of an eager step, in the thread that launches.

    Args:
        mark: Marks a place in the stream.
        most_ahead: Exchanges that may be launched and not reached.
    """

    def __init__(
        self, mark: Callable[[], IsReached] = mark_stream, most_ahead: int = MOST_AHEAD
    ) -> None:
        self._mark = mark
        self._most_ahead = most_ahead
        self._ahead: deque[IsReached] = deque()

    def launched(self) -> None:
        """Wait until few enough exchanges are ahead, outside of CUDA."""
        self._ahead.append(self._mark())
        while len(self._ahead) > self._most_ahead:
            if self._ahead[0]():
                self._ahead.popleft()
            else:
                time.sleep(LOOK_S)
