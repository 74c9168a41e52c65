"""How unevenly rows of late went to the experts of one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class ImbalanceMeter:
    """Fed with the experts' counters whenever somebody asks.

    Args:
        window_s: Over which rows are counted.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()
        self._last = 0.0

    def measure(self, counts: Sequence[int], now_s: float) -> float:
        """Rows of the busiest expert over the mean of all.

        Returns: What it was last while no rows come; 0 before the first.
        """
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()
        first = self._samples[0][1] if self._samples else (0,) * len(counts)
        if not self._samples or now_s - self._samples[-1][0] >= self._window_s / 10:
            self._samples.append((now_s, tuple(counts)))
        rows = [now - then for now, then in zip(counts, first, strict=True)]
        if sum(rows) > 0:
            self._last = max(rows) * len(rows) / sum(rows)
        return self._last
