"""Units that were launched and have not replied: what they cost, counted when they are done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from sglang_afd.mlp.board import Board, Counter
from sglang_afd.rounds.units import Member, Unit
from sglang_afd.trace.mlp import MlpTimeline


class _Launched(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    ticket: int
    unit: Unit
    members: Sequence[Member]
    num_rows: int
    launched_ns: int
    arrivals_ns: Sequence[int | None]


class InFlight:
    """Written to the board and to the timeline with the times at which the host saw them end."""

    def __init__(self, board: Board, timeline: MlpTimeline | None) -> None:
        self._cells = board.cells
        self._timeline = timeline
        self._launched: deque[_Launched] = deque()
        self._done_ns = 0  # when the last one ended

    def __len__(self) -> int:
        return len(self._launched)

    def add(
        self, ticket: int, unit: Unit, members: Sequence[Member], num_rows: int, *, begun_ns: int
    ) -> None:
        """A unit was launched; `begun_ns` is when the host began with it."""
        now_ns = time.monotonic_ns()
        self._cells[Counter.LAUNCH_NS] += now_ns - begun_ns
        self._cells[Counter.LAUNCHES] += 1
        timeline = self._timeline
        arrivals_ns = [] if timeline is None else [timeline.take_arrival(m) for m in members]
        self._launched.append(
            _Launched(
                ticket=ticket,
                unit=unit,
                members=members,
                num_rows=num_rows,
                launched_ns=now_ns,
                arrivals_ns=arrivals_ns,
            )
        )
        self._cells[Counter.IN_FLIGHT] = len(self._launched)

    def done(self, last_ticket: int) -> bool:
        """Units up to `last_ticket` are done; returns whether there were any new ones."""
        if not self._launched or self._launched[0].ticket > last_ticket:
            return False
        now_ns = time.monotonic_ns()
        while self._launched and self._launched[0].ticket <= last_ticket:
            self._count(self._launched.popleft(), now_ns)
        self._cells[Counter.IN_FLIGHT] = len(self._launched)
        return True

    def _count(self, launched: _Launched, now_ns: int) -> None:
        started_ns = max(launched.launched_ns, self._done_ns)
        self._done_ns = now_ns
        unit, cells = launched.unit, self._cells
        cells[Counter.RUN_NS] += now_ns - started_ns
        cells[Counter.RUNS] += 1
        cells[Counter.ROWS] += launched.num_rows
        cells[Counter.EXCHANGES] += len(launched.members) if unit.is_last_piece else 0
        if unit.is_prefill:
            cells[Counter.PREFILL_ROWS] += launched.num_rows
            cells[Counter.PREFILL_PIECES] += 1
        else:
            cells[Counter.DECODE_ROWS] += launched.num_rows
            cells[Counter.DECODE_RUNS] += 1
            cells[Counter.DECODE_RUN_PEERS] += len(launched.members)  # one exchange of each
        if self._timeline is not None:
            self._timeline.ran_on_device(
                unit, launched.members, launched.arrivals_ns, started_ns, now_ns
            )
