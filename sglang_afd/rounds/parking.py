"""How long a round waits for a missing member before it goes on without it (pure).

The time counts from when half of the members are there: an early one must not throw out the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.running_mean import RunningMean


class Patience:
    """The measured time of a round, and the deadlines that follow from it."""

    def __init__(self, options: RoundOptions, num_layers: int) -> None:
        self._options = options
        self._num_layers = num_layers
        self._round_s = RunningMean()

    def measured_round(self, round_s: float) -> None:
        """A whole round took so long, without the time that ended in parking.

        With that time, each parking would make the next one wait longer, without end.
        """
        self._round_s.add(round_s)

    @property
    def park_s(self) -> float:
        """So long half of a round waits for the others."""
        options, round_s = self._options, self._round_s.value
        if round_s is None:
            return options.first_park_s
        share = max(options.park_of_round, options.park_layers / self._num_layers)
        return max(options.min_park_s, share * round_s)

    def deadline_s(
        self, here_s: Sequence[float], num_due: int, moved_s: float, outside_s: Iterable[float]
    ) -> float:
        """When the missing members are parked.

        Args:
            here_s: When the rows of the members that are there arrived.
            num_due: How many members the unit has.
            moved_s: When the previous unit ended.
            outside_s: When other rows that wait arrived, as of peers that are in no round.
        Returns: infinity while nobody waits. Less than half of a round waits twice as long: that
            happens only when most of it hangs.
        """
        half = (num_due + 1) // 2
        if len(here_s) >= half:
            return max(sorted(here_s)[half - 1], moved_s) + self.park_s
        first_s = min((*here_s, *outside_s), default=math.inf)
        return max(first_s, moved_s) + 2 * self.park_s
