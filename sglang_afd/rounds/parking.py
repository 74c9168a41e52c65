"""How long a round waits for a missing member before it goes on without it (pure).

The time counts from when half of the members are there: an early one must not throw out the others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from statistics import median_low

from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.running_mean import RunningMean

TURN_SHARE = 0.125  # of a turn in the mean of its peer's: so about the last eight count


class Patience:
    """The measured times of a round and of the peers' turns, and the deadlines that follow.

    A turn of a peer is the time from a reply to its rows for the next layer. It is seen of one that
    is parked, too: where layers have become slower than the patience that was learnt, rounds fall
    apart before they have ended, and their time alone would never teach more patience.
    """

    def __init__(self, options: RoundOptions, num_layers: int) -> None:
        self._options = options
        self._num_layers = num_layers
        self._round_s = RunningMean()
        self._turns_s: dict[Hashable, float] = {}  # means

    def measured_round(self, round_s: float) -> None:
        """A whole round took so long, without the time that ended in parking.

        With that time, each parking would make the next one wait longer, without end.
        """
        self._round_s.add(round_s)

    def measured_turn(self, peer: Hashable, turn_s: float) -> None:
        """The rows of `peer` came so long after its last reply, in the middle of a step."""
        mean_s = self._turns_s.get(peer, 0.0)
        # Twice the patience that its own turns ask for: one hang cannot spoil the mean for long,
        # and yet a peer that has become slower is followed within a few layers.
        most_s = 2 * max(self._options.min_park_s, self._options.park_layers * mean_s)
        self._turns_s[peer] = mean_s + TURN_SHARE * (min(turn_s, most_s) - mean_s)

    def forget(self, peer: Hashable) -> None:
        """`peer` is gone."""
        self._turns_s.pop(peer, None)

    def park_s(self, decoding: Iterable[Hashable]) -> float:
        """So long half of a round waits for the others.

        Args:
            decoding: Who is in a step. The turns of most of them count, so that one that is far
                slower than the others holds them up no longer for that.
        """
        options, round_s = self._options, self._round_s.value
        turns_s = [self._turns_s[peer] for peer in decoding if peer in self._turns_s]
        turn_s = median_low(turns_s) if turns_s else 0.0
        if round_s is None:
            return max(options.first_park_s, options.park_layers * turn_s)
        share = max(options.park_of_round, options.park_layers / self._num_layers)
        return max(options.min_park_s, share * round_s, options.park_layers * turn_s)

    def deadline_s(
        self,
        here_s: Sequence[float],
        num_due: int,
        moved_s: float,
        outside_s: Iterable[float],
        decoding: Iterable[Hashable],
    ) -> float:
        """When the missing members are parked.

        Args:
            here_s: When the rows of the members that are there arrived.
            num_due: How many members the unit has.
            moved_s: When the previous unit ended.
            outside_s: When other rows that wait arrived, as of peers that are in no round.
            decoding: See `park_s`.
        Returns: infinity while nobody waits. Less than half of a round waits twice as long: that
            happens only when most of it hangs.
        """
        half, park_s = (num_due + 1) // 2, self.park_s(decoding)
        if len(here_s) >= half:
            return max(sorted(here_s)[half - 1], moved_s) + park_s
        first_s = min((*here_s, *outside_s), default=math.inf)
        return max(first_s, moved_s) + 2 * park_s
