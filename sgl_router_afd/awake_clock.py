"""The control plane's clock: monotonic, and it stands while this process cannot hear anybody."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_GAP_S = 2.0  # between two readings that counts in full; the fleet takes a sample every second


class AwakeClock:
    """Seconds that passed while somebody read it, which the event loop does all the time.

    A process that was stopped, or waited for a disk, finds the messages of that time later than
    it finds that all leases have run out: nobody is late whom it did not listen to.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_s = self._now_s = clock()

    def __call__(self) -> float:
        read_s = self._clock()
        self._now_s += min(read_s - self._read_s, MAX_GAP_S)
        self._read_s = read_s
        return self._now_s
