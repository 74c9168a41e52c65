"""How long the start of a round waits for a peer: its own measured host gap (pure).

A host gap is the time from the last reply of one step to the first rows of the next, as the MLP
side sees it. Source of mean + 4 deviations: TCP's retransmission timer, RFC 6298.
"""

from __future__ import annotations

from collections.abc import Hashable
from statistics import median_low

from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.running_mean import RunningMean

SLACK_S = 50e-6  # a transfer; keeps the window of a peer without any deviation open


class HostGap:
    """Mean and deviation of one peer's gaps."""

    __slots__ = ("_deviation_s", "_mean_s")

    def __init__(self, first_s: float) -> None:
        self._mean_s, self._deviation_s = first_s, first_s / 2

    def add(self, gap_s: float) -> None:
        """Take one more gap in."""
        self._deviation_s += 0.25 * (abs(gap_s - self._mean_s) - self._deviation_s)
        self._mean_s += 0.125 * (gap_s - self._mean_s)

    @property
    def wait_s(self) -> float:
        """After so long the peer is late."""
        return self._mean_s + 4 * self._deviation_s + SLACK_S


class Window:
    """The gaps of all peers, and the cap on waiting that follows from them."""

    def __init__(self, options: RoundOptions) -> None:
        self._options = options
        self._gaps: dict[Hashable, HostGap] = {}
        self._round_s = RunningMean()
        self.cap_s = options.window_cap_s

    def measured_gap(self, peer: Hashable, gap_s: float) -> None:
        """`peer` came so long after its last reply."""
        # Twice the cap: one peer that slept cannot spoil its own mean for long, and yet most peers
        # together can raise the cap.
        gap_s = min(gap_s, 2 * self.cap_s)
        if (gap := self._gaps.get(peer)) is None:
            self._gaps[peer] = HostGap(gap_s)
        else:
            gap.add(gap_s)
        self._set_cap()

    def measured_round(self, round_s: float) -> None:
        """A whole round took so long."""
        self._round_s.add(round_s)
        self._set_cap()

    def forget(self, peer: Hashable) -> None:
        """`peer` is gone."""
        self._gaps.pop(peer, None)
        self._set_cap()

    def until_s(self, peer: Hashable, start_s: float, replied_s: float | None) -> float:
        """When waiting for `peer` ends, in a window that opened at `start_s`."""
        gap = self._gaps.get(peer)
        latest_s = start_s + self.cap_s
        if gap is None or replied_s is None:
            return latest_s
        return min(latest_s, replied_s + gap.wait_s)

    def _set_cap(self) -> None:
        options = self._options
        most_s = median_low(gap.wait_s for gap in self._gaps.values()) if self._gaps else 0.0
        round_s = self._round_s.value or 0.0
        wanted_s = max(options.window_cap_s, options.window_cap_of_round * round_s, most_s)
        self.cap_s = min(wanted_s, options.window_limit_s)
