"""Launch steps as SGLang's overlap scheduler does: one while the one before runs, no further.

A host that ran on would announce steps, and then that none is to come, long before the device gets
there, and would write over what an earlier step has not copied to the device yet.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Mark(Protocol):
    """A place in the device's stream, such as a `torch.cuda.Event` behind a step."""

    def synchronize(self) -> None:
        """Wait until the device has got there."""


class OneAhead:
    """Told of each launch; returns from it when the next step may be launched."""

    def __init__(self) -> None:
        self._ahead: deque[Mark] = deque()

    def launched(self, mark: Mark) -> None:
        """A step was launched that ends at `mark`."""
        self._ahead.append(mark)
        if len(self._ahead) > 1:
            self._ahead.popleft().synchronize()
