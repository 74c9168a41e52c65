"""Where a step is cut into micro-batches (pure: row counts in, ranges out)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# A part smaller than this share of an even one reads every expert's weights again for next to
# nothing, so the step is cut into fewer parts.
SMALLEST_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One micro-batch: a range of the step's rows and of its sequences.

    The first sequence may have begun in an earlier part and the last may go on in a later one.
    """

    first_row: int
    stop_row: int
    first_sequence: int
    stop_sequence: int
    num_rows_before: int = 0  # of the first sequence, in earlier parts
    num_rows_after: int = 0  # of the last sequence, in later parts

    @property
    def num_rows(self) -> int:
        """At least one."""
        return self.stop_row - self.first_row

    def rows_of_sequences(self, rows: Sequence[int]) -> list[int]:
        """How many rows of each of its sequences this part has.

        Args:
            rows: What `split` was given.
        """
        own = list(rows[self.first_sequence : self.stop_sequence])
        own[0] -= self.num_rows_before
        own[-1] -= self.num_rows_after
        return own


def split(rows: Sequence[int], num_parts: int, *, may_cut_inside: bool = True) -> list[Part]:
    """Cut a step into at most `num_parts` parts, as equal as they can be.

    Args:
        rows: Of each sequence in this step, in order; one each for decode.
        num_parts: At least 1.
        may_cut_inside: May a sequence be in two parts? The later part then attends to what the
            earlier one has written in the same layer.

    Returns: In order of rows; fewer than asked for when there are too few rows, or when one part
        would be a sliver; one part is the whole step.
    """
    stops = list(accumulate(rows))  # of each sequence, in rows of the step
    num_rows = stops[-1]
    for number in range(min(num_parts, num_rows), 1, -1):
        cuts = [num_rows * index // number for index in range(number + 1)]
        if not may_cut_inside:
            cuts = [0, *(_nearest(stops, cut) for cut in cuts[1:-1]), num_rows]
        sizes = [stop - first for first, stop in zip(cuts, cuts[1:], strict=False)]
        if min(sizes) >= max(1, SMALLEST_SHARE * num_rows / number):
            return [_part(stops, *ends) for ends in zip(cuts, cuts[1:], strict=False)]
    return [_part(stops, 0, num_rows)]


def _nearest(stops: Sequence[int], cut: int) -> int:
    index = bisect_left(stops, cut)
    before = stops[index - 1] if index else 0
    return before if cut - before <= stops[index] - cut else stops[index]


def _part(stops: Sequence[int], first_row: int, stop_row: int) -> Part:
    first = bisect_right(stops, first_row)  # the sequence that holds the first row
    last = bisect_left(stops, stop_row)  # the sequence that holds the last row
    return Part(
        first_row=first_row,
        stop_row=stop_row,
        first_sequence=first,
        stop_sequence=last + 1,
        num_rows_before=first_row - (stops[first - 1] if first else 0),
        num_rows_after=stops[last] - stop_row,
    )
