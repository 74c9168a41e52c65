"""Rules that the rounds do not have any more, or never had, to compare theirs with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sglang_afd.rounds.parking import Patience
from sglang_afd.rounds.rounds import Rounds


class DeafToTurns(Patience):
    """Learns from whole rounds alone."""

    def measured_turn(self, peer: Hashable, turn_s: float) -> None:
        """Nothing is learnt."""


def deaf_rounds(layer_ids: Sequence[int]) -> Rounds:
    """`Rounds` whose patience learns from whole rounds alone."""
    rounds = Rounds(layer_ids)
    rounds._decode._patience.__class__ = DeafToTurns
    return rounds
