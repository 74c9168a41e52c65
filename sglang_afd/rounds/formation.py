"""When a round starts, and where: at the first layer, or where a peer waits aside (pure)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

from sglang_afd.rounds.counters import RoundCounters
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.peer_state import FIRST, PeerState, Place, Position
from sglang_afd.rounds.window import Window


class Formation:
    """Holds the start of a round back while a peer is likely to come in time for it."""

    def __init__(
        self, peers: Mapping[Hashable, PeerState], options: RoundOptions, counters: RoundCounters
    ) -> None:
        self.window = Window(options)
        self.ended_s = -math.inf  # when the last round ended
        self.look_at_s = math.inf  # when a round may start though nothing happens
        self._peers = peers
        self._counters = counters
        self._is_held_back = False

    def next_start(self, now_s: float) -> Position | None:
        """Where a round starts now; None while there is nobody, or somebody is waited for."""
        self.look_at_s = math.inf
        gathered = [state for state in self._peers.values() if state.place is Place.GATHERED]
        if not gathered:
            return self._start_aside(now_s)
        first_s = min(state.slots[0].arrived_s for state in gathered)
        # Counted from the first arrival alone, two halves of the peers would take turns for ever,
        # each too late for the other's window.
        start_s = max(first_s, self.ended_s)
        missing = self._missing()
        if not self._is_over(missing, start_s, now_s):
            self._is_held_back = True
            return None
        self._give_up(missing)
        self._count(now_s - start_s, is_vain=bool(missing))
        return FIRST

    def _start_aside(self, now_s: float) -> Position | None:
        """Take those along that wait in the middle of their steps, unless a round is about to form.

        They board that one when it comes to where they stand. Started now, they would make all
        others wait for most of a step.
        """
        aside = positions_aside(self._peers)
        if not aside:
            return None
        missing = self._missing()
        if not self._is_over(missing, self.ended_s, now_s):
            return None
        self._give_up(missing)
        return min(aside)

    def _missing(self) -> list[PeerState]:
        return [state for state in self._peers.values() if state.is_expected]

    def _is_over(self, missing: list[PeerState], start_s: float, now_s: float) -> bool:
        until_s = max(
            (self.window.until_s(state.peer, start_s, state.replied_s) for state in missing),
            default=-math.inf,
        )
        if now_s < until_s:
            self.look_at_s = until_s
        return now_s >= until_s

    def _give_up(self, missing: list[PeerState]) -> None:
        for state in missing:
            state.was_missed = True

    def _count(self, waited_s: float, *, is_vain: bool) -> None:
        if self._is_held_back:
            self._counters.windows += 1
            self._counters.vain_windows += is_vain
            self._counters.window_s += waited_s
        self._is_held_back = False


def positions_aside(peers: Mapping[Hashable, PeerState]) -> list[Position]:
    """Where peers wait in the middle of their steps."""
    return [
        state.stands_at
        for state in peers.values()
        if state.place is Place.ASIDE and state.stands_at is not None
    ]
