"""Prefill beside the rounds: first come, first served, in pieces of about a decode unit (pure).

A run of experts cannot be interrupted: a long one would hold up the round at each layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from sglang_afd.rounds.counters import RoundCounters
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.running_mean import RunningMean
from sglang_afd.rounds.units import Member, Unit


@dataclass(slots=True)
class _Exchange:
    member: Member
    arrived_s: float
    ready_s: float  # when its next piece could have run
    done_rows: int = 0


class PrefillQueue:
    """Cuts exchanges into units; at most one goes between two decode units that are ready."""

    def __init__(self, options: RoundOptions, counters: RoundCounters) -> None:
        self._options = options
        self._counters = counters
        self._waiting: deque[_Exchange] = deque()
        self._decode_unit_s = RunningMean()
        self._piece_rows = RunningMean()
        self._piece_s = RunningMean()
        self._was_last = False
        self._running: tuple[Unit, float] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, member: Member, now_s: float) -> None:
        """Rows are here; the same exchange twice is one."""
        if any(exchange.member == member for exchange in self._waiting):
            self._counters.repeated += 1
            return
        self._waiting.append(_Exchange(member, now_s, now_s))

    def drop(self, peer: Hashable) -> None:
        """`peer` is gone."""
        self._keep(lambda member: member.peer != peer)

    def give_up(self, given_up: Member) -> None:
        """Nothing more of this exchange is to run."""
        self._keep(lambda member: member != given_up)

    def has(self, peer: Hashable) -> bool:
        """Whether an exchange of `peer` waits."""
        return any(exchange.member.peer == peer for exchange in self._waiting)

    def is_due(self, now_s: float) -> bool:
        """Whether a piece goes before a decode unit that is ready."""
        if not self._waiting or self._was_last:
            return False
        return now_s >= self._waiting[0].arrived_s + self._options.prefill_age_s

    def decode_goes(self, unit: Unit, now_s: float) -> None:
        """A decode unit is run now."""
        self._was_last = False
        self._running = (unit, now_s)

    def take(self, now_s: float, is_anybody_decoding: bool) -> Unit | None:
        """The next piece; all that is left of an exchange when it holds up nobody's decode step."""
        if not self._waiting:
            return None
        exchange = self._waiting[0]
        member = exchange.member
        first, left = exchange.done_rows, member.num_rows - exchange.done_rows
        num_rows = min(left, self.piece_rows) if is_anybody_decoding else left
        exchange.done_rows += num_rows
        if is_last := exchange.done_rows == member.num_rows:
            self._waiting.popleft()
        self._was_last = True
        self._count(num_rows, now_s - exchange.ready_s)
        unit = Unit(
            layer_id=member.layer_id,
            members=(member,),
            micro_batch_id=member.micro_batch_id,
            is_prefill=True,
            first_row=first,
            num_rows=num_rows,
            is_last_piece=is_last,
        )
        self._running = (unit, now_s)
        return unit

    def finished(self, unit: Unit, now_s: float) -> None:
        """Measure the run; a run that overlaps another is not measured."""
        head = self._waiting[0] if self._waiting else None
        if head is not None and head.member in unit.members:
            head.ready_s = now_s
        running, self._running = self._running, None
        if running is None or running[0] is not unit or now_s <= running[1]:
            return
        took_s = now_s - running[1]
        if not unit.is_prefill:
            self._decode_unit_s.add(took_s)
        elif unit.num_rows:
            self._piece_rows.add(unit.num_rows)
            self._piece_s.add(took_s)

    @property
    def piece_rows(self) -> int:
        """So many rows take the time of `piece_units` decode units."""
        options, unit_s = self._options, self._decode_unit_s.value
        rows, rows_s = self._piece_rows.value, self._piece_s.value
        if unit_s is None or rows is None or rows_s is None:
            return options.first_piece_rows
        return max(options.min_piece_rows, int(options.piece_units * unit_s * rows / rows_s))

    def _keep(self, is_wanted: Callable[[Member], bool]) -> None:
        self._waiting = deque(each for each in self._waiting if is_wanted(each.member))

    def _count(self, num_rows: int, age_s: float) -> None:
        counters = self._counters
        counters.prefill_pieces += 1
        counters.prefill_rows += num_rows
        counters.prefill_age_s += age_s
        counters.max_prefill_age_s = max(counters.max_prefill_age_s, age_s)
