"""What both main loops do with a hub's events: tell the order, the board and the timeline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from sglang_afd.mlp.board import Board, Counter
from sglang_afd.mlp.rank_order import RankOrder
from sglang_afd.protocol.messages import Kind, StepIntent, Withdrawal
from sglang_afd.rounds.units import Intent
from sglang_afd.trace.mlp import MlpTimeline
from sglang_afd.transport.base import (
    Announced,
    Arrived,
    Event,
    Exchange,
    FollowerGone,
    FollowerJoined,
    LeaderFound,
    LeaderLost,
    Ordered,
    PeerAttached,
    PeerGone,
)

logger = logging.getLogger(__name__)


class Expels(Protocol):
    """What is needed of a `Hub`."""

    def expel(self, reason: str) -> list[Event]:
        """See `Hub`."""


class KeepsExchanges(Protocol):
    """A main loop, which has the exchanges that wait."""

    def attached(self, event: PeerAttached) -> None:
        """A peer passed the handshake; nothing of it has come yet."""

    def arrived(self, exchange: Exchange, now_s: float) -> None:
        """Keep an exchange, and tell the order of it."""

    def gone(self, peer: bytes) -> None:
        """A peer left; called before anybody else hears of it."""

    @property
    def num_waiting(self) -> int:
        """Exchanges that have arrived and not run."""


class Reception:
    """Takes the events of one rank's hub."""

    def __init__(
        self,
        hub: Expels,
        board: Board,
        order: RankOrder,
        keeper: KeepsExchanges,
        timeline: MlpTimeline | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = hub
        self._cells = board.cells
        self._peers = board.peers
        self._order = order
        self._keeper = keeper
        self._timeline = timeline
        self._clock = clock

    def take_all(self, events: Sequence[Event]) -> None:
        """Take what one poll brought."""
        for event in events:
            self._take(event)
        self._cells[Counter.WAITING] = self._keeper.num_waiting
        lost = [event.rank for event in events if isinstance(event, FollowerGone)]
        if lost:
            # What they had run of the orders is not known; attached anew, everything pending comes
            # again. Not before the last event: those of peers sent away would follow.
            self.expel(f"MLP rank(s) {lost} went away")

    def expel(self, reason: str) -> None:
        """Send every attention server away; each attaches again, and sends again what waits."""
        for event in self._hub.expel(reason):
            self._take(event)
        self._cells[Counter.WAITING] = self._keeper.num_waiting

    def _take(self, event: Event) -> None:
        now_s = self._clock()
        match event:
            case Arrived(exchange=exchange):
                self._keeper.arrived(exchange, now_s)
            case Announced(peer=peer, message=message):
                self._note(peer, message, now_s)
            case PeerAttached():
                self._meet(event, now_s)
            case PeerGone():
                self._forget(event, now_s)
            case FollowerJoined(rank=rank):
                self._order.follower_joined(rank)
                logger.info("rank %d follows", rank)
            case FollowerGone(rank=rank):
                self._order.follower_gone(rank)
                logger.warning("rank %d follows no longer; attention servers attach again", rank)
            case Ordered() | LeaderLost() | LeaderFound():
                self._hear(event, now_s)
            case _:
                assert_never(event)

    def _hear(self, event: Ordered | LeaderLost | LeaderFound, now_s: float) -> None:
        """What rank 0 says to another rank."""
        if isinstance(event, Ordered):
            self._order.ordered(event.order)
        else:
            self._order.leader_changed(now_s)

    def _note(self, peer: bytes, message: StepIntent | Withdrawal, now_s: float) -> None:
        match message:
            case StepIntent():
                self._order.announced(_intent(peer, message), now_s)
            case Withdrawal():
                self._order.withdrawn(peer, now_s, message.step)
            case _:
                assert_never(message)

    def _meet(self, event: PeerAttached, now_s: float) -> None:
        self._cells[Counter.PEERS] += 1
        self._cells[Counter.ATTACHES] += 1
        self._peers.attached(event.peer, event.server_id)
        self._keeper.attached(event)
        self._order.peer_attached(event.peer, event.epoch, now_s)
        if self._timeline is not None:
            self._timeline.attached(event.peer, event.server_id, event.epoch)
        logger.info("attached %s, epoch %d", event.server_id, event.epoch)

    def _forget(self, event: PeerGone, now_s: float) -> None:
        self._keeper.gone(event.peer)
        self._cells[Counter.PEERS] -= 1
        is_lost = event.reason != "detached"
        self._cells[Counter.LOST_PEERS] += is_lost
        self._peers.gone(event.peer, event.server_id, reason=event.reason if is_lost else "")
        self._order.peer_gone(event.peer, now_s)
        if self._timeline is not None:
            self._timeline.gone(event.peer, event.server_id, event.reason)
        logger.info("%s is gone: %s", event.server_id, event.reason)


def _intent(peer: bytes, message: StepIntent) -> Intent:
    return Intent(
        peer=peer,
        step=message.step,
        num_rows=message.num_rows,
        num_micro_batches=message.num_micro_batches,
        is_prefill=message.kind is Kind.PREFILL,
    )
