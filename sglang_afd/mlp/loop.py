"""The MLP role's main loop: take what arrived, ask the rounds what to run, run it, reply."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from sglang_afd.mlp.board import Board, Counter, State
from sglang_afd.mlp.rank_order import RankOrder
from sglang_afd.mlp.reception import Reception
from sglang_afd.protocol.messages import RefusalCode
from sglang_afd.rounds.units import Member, Unit
from sglang_afd.trace.mlp import MlpTimeline
from sglang_afd.transport.base import Exchange, Hub, PeerAttached, Rows

logger = logging.getLogger(__name__)

IDLE_TURN_S = 0.2  # the loop turns at least this often, which /health watches


class RunsExperts(Protocol):
    """What the loop needs of `Experts`."""

    def run(self, layer_id: int, rows: Rows) -> Tensor:
        """This rank's share of one layer's expert sum, [T, H]."""

    def count_rows(self, rows: Rows) -> Tensor:
        """Choices of each of this rank's experts: [num_local] int64."""


class Loop:
    """Serves one rank until `should_stop` says so."""

    def __init__(
        self,
        hub: Hub,
        experts: RunsExperts,
        board: Board,
        order: RankOrder,
        should_stop: Callable[[], bool],
        timeline: MlpTimeline | None = None,
    ) -> None:
        self._hub = hub
        self._experts = experts
        self._board = board
        self._words = board.words
        self._order = order
        self._should_stop = should_stop
        self._timeline = timeline
        self._exchanges: dict[Member, Exchange] = {}
        self._partials: dict[Member, list[Tensor]] = {}  # of exchanges that run in pieces
        self._reception = Reception(hub, board, order, self, timeline)

    def run(self) -> None:
        """Turn until told to stop; a turn takes what has arrived and runs at most one unit."""
        self._words[Counter.STATE] = State.SERVING
        timeout_s = 0.0
        with torch.inference_mode():
            while not self._should_stop():
                started_ns = time.monotonic_ns()
                self._words[Counter.TURNED_AT_NS] = started_ns
                num_waiting = len(self._exchanges)
                events = self._hub.poll(timeout_s)
                if self._timeline is not None:
                    self._timeline.waited(started_ns, num_waiting)
                self._reception.take_all(events)
                self._words[Counter.WAIT_NS] += time.monotonic_ns() - started_ns
                self._words[Counter.REFUSED] = self._hub.num_refused
                unit = self._order.next_unit(time.monotonic())
                if unit is not None:
                    self._serve(unit)
                    self._order.finished(unit, time.monotonic())
                self._order.show(self._board)
                timeout_s = self._may_sleep_s() if unit is None else 0.0
        self._words[Counter.STATE] = State.STOPPING

    def _may_sleep_s(self) -> float:
        now_s = time.monotonic()
        wake_at_s = self._order.wake_at_s(now_s)
        return IDLE_TURN_S if wake_at_s is None else min(IDLE_TURN_S, max(0.0, wake_at_s - now_s))

    @property
    def num_waiting(self) -> int:
        """See `KeepsExchanges`."""
        return len(self._exchanges)

    def attached(self, event: PeerAttached) -> None:
        """See `KeepsExchanges`; nothing to prepare."""

    def arrived(self, exchange: Exchange, now_s: float) -> None:
        """See `KeepsExchanges`."""
        member = exchange.member
        if self._timeline is not None:
            self._timeline.arrived(member)
        self._exchanges[member] = exchange
        self._order.arrived(member, now_s)

    def gone(self, peer: bytes) -> None:
        """See `KeepsExchanges`."""
        for member in [member for member in self._exchanges if member.peer == peer]:
            del self._exchanges[member]
            self._partials.pop(member, None)

    def _serve(self, unit: Unit) -> None:
        members = [member for member in unit.members if member in self._exchanges]
        exchanges = [self._exchanges[member] for member in members]
        if not exchanges:
            return
        rows = _together([_piece(exchange.rows, unit) for exchange in exchanges])
        started_ns = time.monotonic_ns()
        try:
            partial = self._experts.run(unit.layer_id, rows)
        except (RuntimeError, ValueError, IndexError) as error:
            self._decline(members, error)
            if self._timeline is not None:
                self._timeline.failed(unit, started_ns, str(error))
            return
        ran_ns = time.monotonic_ns()
        if unit.is_prefill:
            self._reply_prefill(members[0], unit, partial)
        else:
            self._reply(members, partial)
        if self._timeline is not None:
            self._timeline.ran(unit, members, started_ns, ran_ns)
        self._count(unit, exchanges, rows, started_ns, ran_ns)

    def _reply(self, members: list[Member], partial: Tensor) -> None:
        start = 0
        for member in members:
            stop = start + member.num_rows
            if self._timeline is not None:
                self._timeline.replying(member)
            self._hub.reply(self._exchanges.pop(member), partial[start:stop])
            start = stop

    def _reply_prefill(self, member: Member, unit: Unit, partial: Tensor) -> None:
        pieces = self._partials.setdefault(member, [])
        pieces.append(partial)
        if unit.is_last_piece:
            del self._partials[member]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            if self._timeline is not None:
                self._timeline.replying(member)
            self._hub.reply(self._exchanges.pop(member), whole)

    def _decline(self, members: list[Member], error: Exception) -> None:
        logger.exception("the experts could not run")
        for member in members:
            self._words[Counter.FAILED] += 1
            self._partials.pop(member, None)
            exchange = self._exchanges.pop(member)
            self._hub.decline(exchange, RefusalCode.EXPERT, f"the experts failed: {error}")
            self._order.declined(member, time.monotonic())

    def _count(
        self, unit: Unit, exchanges: list[Exchange], rows: Rows, started_ns: int, ran_ns: int
    ) -> None:
        words = self._words
        num_rows = rows.hidden_states.shape[0]
        words[Counter.RUN_NS] += ran_ns - started_ns
        words[Counter.REPLY_NS] += time.monotonic_ns() - ran_ns
        words[Counter.RUNS] += 1
        words[Counter.ROWS] += num_rows
        words[Counter.EXCHANGES] += len(exchanges) if unit.is_last_piece else 0
        words[Counter.WAITING] = len(self._exchanges)
        if unit.is_prefill:
            words[Counter.PREFILL_ROWS] += num_rows
            words[Counter.PREFILL_PIECES] += 1
        else:
            words[Counter.DECODE_ROWS] += num_rows
            words[Counter.DECODE_RUNS] += 1
            words[Counter.DECODE_RUN_PEERS] += len({exchange.peer for exchange in exchanges})
        words[len(Counter) :] += self._experts.count_rows(rows).numpy()


def _piece(rows: Rows, unit: Unit) -> Rows:
    if not unit.is_prefill or unit.num_rows == rows.hidden_states.shape[0]:
        return rows
    piece = slice(unit.first_row, unit.first_row + unit.num_rows)
    return Rows(
        hidden_states=rows.hidden_states[piece],
        topk_ids=rows.topk_ids[piece],
        topk_weights=rows.topk_weights[piece],
    )


def _together(all_rows: list[Rows]) -> Rows:
    if len(all_rows) == 1:
        return all_rows[0]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(rows, name) for rows in all_rows])

    return Rows(
        hidden_states=joined("hidden_states"),
        topk_ids=joined("topk_ids"),
        topk_weights=joined("topk_weights"),
    )
