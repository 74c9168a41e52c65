"""Numbers of rows for which kernels are compiled, and graphs captured (pure)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

DEFAULT_GRAPH_ROWS = (*(8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),)
EAGER_STEP = 256  # between sizes beyond the last graph: few enough to warm each of them up


class RowBuckets:
    """A unit runs with the smallest size that holds its rows; the rows beyond them are nobody's.

    Args:
        graph_rows: Sizes that graphs are captured for.
        max_rows: The largest unit.
    """

    def __init__(self, graph_rows: Sequence[int], max_rows: int) -> None:
        self.max_rows = max_rows
        self.captured = tuple(sorted({min(rows, max_rows) for rows in graph_rows}))
        last = self.captured[-1] if self.captured else 0
        first_eager = (last // EAGER_STEP + 1) * EAGER_STEP
        eager = {
            min(rows, max_rows) for rows in range(first_eager, max_rows + EAGER_STEP, EAGER_STEP)
        }
        if not self.captured:
            eager |= {rows for rows in DEFAULT_GRAPH_ROWS if rows < max_rows}
        self.eager = tuple(sorted(eager - set(self.captured)))
        self.all = tuple(sorted({*self.captured, *self.eager}))

    def fit(self, num_rows: int) -> int:
        """The size for so many rows, which are at most `max_rows`."""
        return self.all[bisect_left(self.all, num_rows)]


def graph_rows(listed: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """The sizes to capture: as listed, or the usual ones, up to `max_rows`."""
    return tuple(rows for rows in (listed or DEFAULT_GRAPH_ROWS) if rows <= max_rows)
