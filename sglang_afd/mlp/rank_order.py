"""Which unit this rank runs next: by the rounds on rank 0, by rank 0's word on the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

import msgspec

from sglang_afd.config import ROUNDS_VARIABLE
from sglang_afd.mlp.board import Board
from sglang_afd.protocol.messages import RunUnit
from sglang_afd.rounds.arrival import ArrivalQueue
from sglang_afd.rounds.follower import FollowerQueue
from sglang_afd.rounds.orders import UnitOrder, order_of
from sglang_afd.rounds.rounds import Rounds
from sglang_afd.rounds.units import Intent, Member, Unit, UnitSource

logger = logging.getLogger(__name__)

LONG_S = 5.0  # rows that wait so long for ranks to follow deserve a line in the log


class RankOrder:
    """Feeds a `UnitSource` and tells the other ranks of each decode unit before it runs.

    While a rank does not follow yet nothing runs: it could not know what this rank decided.

    Args:
        source: What decides on this rank.
        publish: Tells every following rank; unused where there is none.
        num_followers: Ranks that have to follow before anything runs.
    """

    def __init__(
        self, source: UnitSource, publish: Callable[[RunUnit], None], *, num_followers: int
    ) -> None:
        self.source = source
        self._publish = publish
        self.num_followers = num_followers
        self._followers: set[int] = set()
        self._epochs: dict[Hashable, int] = {}
        self._waiting_since_s: float | None = None  # rows, for ranks that do not follow yet
        self._has_warned = False

    def peer_attached(self, peer: Hashable, epoch: int, now_s: float) -> None:
        """See `UnitSource`."""
        self._epochs[peer] = epoch
        self.source.peer_attached(peer, epoch, now_s)

    def peer_gone(self, peer: Hashable, now_s: float) -> None:
        """See `UnitSource`."""
        self._epochs.pop(peer, None)
        self.source.peer_gone(peer, now_s)

    def arrived(self, member: Member, now_s: float) -> None:
        """See `UnitSource`."""
        self.source.arrived(member, now_s)
        if not self._is_whole and self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def announced(self, intent: Intent, now_s: float) -> None:
        """See `UnitSource`."""
        self.source.announced(intent, now_s)

    def withdrawn(self, peer: Hashable, now_s: float, first_step: int = 0) -> None:
        """See `UnitSource`."""
        self.source.withdrawn(peer, now_s, first_step)

    def finished(self, unit: Unit, now_s: float) -> None:
        """See `UnitSource`."""
        self.source.finished(unit, now_s)

    def declined(self, member: Member, now_s: float) -> None:
        """See `UnitSource`."""
        self.source.declined(member, now_s)

    def follower_joined(self, rank: int) -> None:
        """A rank will hear every unit from now on."""
        self._followers.add(rank)
        if self._is_whole:
            self._waiting_since_s, self._has_warned = None, False

    def follower_gone(self, rank: int) -> None:
        """A rank will hear nothing any more."""
        self._followers.discard(rank)

    def next_unit(self, now_s: float) -> Unit | None:
        """See `UnitSource`; the other ranks know of it when this returns."""
        if not self._is_whole:
            self._warn_after(now_s)
            return None
        unit = self.source.next_unit(now_s)
        if unit is not None and self.num_followers and not unit.is_prefill:
            self._publish(_to_message(order_of(unit, self._epochs)))
        return unit

    def wake_at_s(self, now_s: float) -> float | None:
        """See `UnitSource`."""
        return self.source.wake_at_s(now_s) if self._is_whole else None

    def ordered(self, message: RunUnit) -> None:
        """Rank 0 said what comes next."""
        if isinstance(self.source, FollowerQueue):
            self.source.ordered(_to_order(message))

    def leader_changed(self, now_s: float) -> None:
        """Rank 0 is gone, or another one, whose sequence begins anew."""
        if isinstance(self.source, FollowerQueue):
            self.source.leader_changed(now_s)

    def show(self, board: Board) -> None:
        """Write what was counted to the board."""
        if isinstance(self.source, Rounds | FollowerQueue):
            board.show_rounds(self.source.counters)

    def _warn_after(self, now_s: float) -> None:
        since_s = self._waiting_since_s
        if since_s is None or self._has_warned or now_s < since_s + LONG_S:
            return
        self._has_warned = True
        missing = [rank for rank in range(1, self.num_followers + 1) if rank not in self._followers]
        logger.warning(
            "rows have waited for %g s, since MLP rank(s) %s do not follow this one; can they "
            "reach its exchange address, and is %s the same on every rank?",
            LONG_S,
            missing,
            ROUNDS_VARIABLE,
        )

    @property
    def _is_whole(self) -> bool:
        return len(self._followers) >= self.num_followers


def _to_message(order: UnitOrder) -> RunUnit:
    return msgspec.convert(order, RunUnit, from_attributes=True)


def _to_order(message: RunUnit) -> UnitOrder:
    return msgspec.convert(message, UnitOrder, from_attributes=True)


def make_rank_order(
    publish: Callable[[RunUnit], None],
    layer_ids: Sequence[int],
    *,
    rank: int,
    ep_size: int,
    has_rounds: bool = True,
) -> RankOrder:
    """What decides on this rank of a group.

    Args:
        publish: See `RankOrder`.
        layer_ids: The MoE layers, in the order in which a step passes them.
        rank: Ours; rank 0 leads.
        ep_size: Ranks of the group.
        has_rounds: False serves first come, first served, on every rank by itself.
    """
    if not has_rounds:
        return RankOrder(ArrivalQueue(), publish, num_followers=0)
    if rank:
        return RankOrder(FollowerQueue(), publish, num_followers=0)
    return RankOrder(Rounds(layer_ids), publish, num_followers=ep_size - 1)
