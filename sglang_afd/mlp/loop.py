"""The MLP role's main loop: take what arrived, ask the queue what to run, run it, reply."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor

from sglang_afd.mlp.board import Board, Counter, State
from sglang_afd.mlp.experts import Experts
from sglang_afd.protocol.messages import Kind, RefusalCode
from sglang_afd.rounds.arrival import ArrivalQueue
from sglang_afd.rounds.units import Member, Unit
from sglang_afd.transport.base import (
    Announced,
    Arrived,
    Event,
    Exchange,
    Hub,
    PeerAttached,
    PeerGone,
    Rows,
)

logger = logging.getLogger(__name__)

IDLE_TURN_S = 0.2  # the loop turns at least this often, which /health watches


class Loop:
    """Serves one rank until `should_stop` says so."""

    def __init__(
        self, hub: Hub, experts: Experts, board: Board, should_stop: Callable[[], bool]
    ) -> None:
        self._hub = hub
        self._experts = experts
        self._words = board.words
        self._should_stop = should_stop
        self._queue = ArrivalQueue()
        self._exchanges: dict[Member, Exchange] = {}

    def run(self) -> None:
        """Turn until told to stop; a turn takes what has arrived and runs at most one unit."""
        self._words[Counter.STATE] = State.SERVING
        with torch.inference_mode():
            while not self._should_stop():
                started_ns = time.monotonic_ns()
                self._words[Counter.TURNED_AT_NS] = started_ns
                for event in self._hub.poll(0.0 if self._queue else IDLE_TURN_S):
                    self._take(event)
                self._words[Counter.WAIT_NS] += time.monotonic_ns() - started_ns
                self._words[Counter.REFUSED] = self._hub.num_refused
                if (unit := self._queue.next_unit(time.monotonic())) is not None:
                    self._serve(unit)
        self._words[Counter.STATE] = State.STOPPING

    def _take(self, event: Event) -> None:
        match event:
            case Arrived(exchange=exchange):
                member = exchange.member
                self._exchanges[member] = exchange
                self._queue.arrived(member, time.monotonic())
            case Announced():
                pass
            case PeerAttached():
                self._words[Counter.PEERS] += 1
                self._words[Counter.ATTACHES] += 1
                logger.info("attached %s, epoch %d", event.server_id, event.epoch)
            case PeerGone():
                self._words[Counter.PEERS] -= 1
                self._words[Counter.LOST_PEERS] += event.reason != "detached"
                self._queue.peer_gone(event.peer, time.monotonic())
                self._exchanges = {
                    member: exchange
                    for member, exchange in self._exchanges.items()
                    if member.peer != event.peer
                }
                logger.info("%s is gone: %s", event.server_id, event.reason)
            case _:
                assert_never(event)
        self._words[Counter.WAITING] = len(self._queue)

    def _serve(self, unit: Unit) -> None:
        exchanges = [self._exchanges.pop(member) for member in unit.members]
        rows = _together([exchange.rows for exchange in exchanges])
        started_ns = time.monotonic_ns()
        try:
            partial = self._experts.run(unit.layer_id, rows)
        except (RuntimeError, ValueError, IndexError) as error:
            self._decline(exchanges, error)
            return
        ran_ns = time.monotonic_ns()
        start = 0
        for exchange in exchanges:
            stop = start + exchange.header.num_rows
            self._hub.reply(exchange, partial[start:stop])
            start = stop
        self._count(exchanges, rows, started_ns, ran_ns)

    def _decline(self, exchanges: list[Exchange], error: Exception) -> None:
        logger.exception("the experts could not run")
        for exchange in exchanges:
            self._words[Counter.FAILED] += 1
            self._hub.decline(exchange, RefusalCode.EXPERT, f"the experts failed: {error}")

    def _count(self, exchanges: list[Exchange], rows: Rows, started_ns: int, ran_ns: int) -> None:
        words = self._words
        words[Counter.RUN_NS] += ran_ns - started_ns
        words[Counter.REPLY_NS] += time.monotonic_ns() - ran_ns
        words[Counter.RUNS] += 1
        words[Counter.EXCHANGES] += len(exchanges)
        words[Counter.WAITING] = len(self._queue)
        for exchange in exchanges:
            num_rows = exchange.header.num_rows
            is_decode = exchange.header.kind is Kind.DECODE
            words[Counter.ROWS] += num_rows
            words[Counter.DECODE_ROWS if is_decode else Counter.PREFILL_ROWS] += num_rows
        words[len(Counter) :] += self._experts.count_rows(rows).numpy()


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
