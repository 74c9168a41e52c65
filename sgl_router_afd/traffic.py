"""What this router itself knows of each server: the requests that it sent there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sgl_router_afd.dataplane.counters import (
    FAILED,
    IN_FLIGHT,
    MAX_SERVERS,
    SERVED,
    TTFT_COUNT,
    TTFT_SUM_US,
    SharedCounters,
)
from sgl_router_afd.slots import Slots

WINDOW_S = 10.0
SAMPLE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one server."""

    num_in_flight: int
    num_served: int
    num_failed: int
    ttft_s: float | None  # mean of about the last ten seconds; None when there was none


NO_TRAFFIC = Traffic(num_in_flight=0, num_served=0, num_failed=0, ttft_s=None)


@dataclass(frozen=True, kw_only=True)
class _Sample:
    time_s: float
    sums_us: list[int]
    counts: list[int]


class TrafficBook:
    """Reads the counters of the relay processes, and remembers those of ten seconds ago.

    Args:
        counters: Of all relay processes.
        clock: Monotonic seconds.
    """

    def __init__(self, counters: SharedCounters, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._clock = clock
        self.slots = Slots(MAX_SERVERS, self._is_idle, self._start_anew)
        self._base: dict[int, tuple[int, int]] = {}  # what earlier owners of a slot had
        self._samples: deque[_Sample] = deque([self._sample()])

    def of(self, server_id: str) -> Traffic:
        """The traffic of a server; none of one that has no slot."""
        slot = self.slots.of(server_id)
        if slot is None:
            return NO_TRAFFIC
        total = self._counters.total
        served, failed = self._base.get(slot, (0, 0))
        return Traffic(
            num_in_flight=total(IN_FLIGHT + slot),
            num_served=total(SERVED + slot) - served,
            num_failed=total(FAILED + slot) - failed,
            ttft_s=self._ttft_s(slot),
        )

    def num_in_flight(self, server_id: str) -> int:
        slot = self.slots.of(server_id)
        return 0 if slot is None else self._counters.total(IN_FLIGHT + slot)

    def sample(self) -> None:
        """To be called about every `SAMPLE_S`."""
        self._samples.append(self._sample())
        # The oldest stays one step longer, so that the window is never shorter than it says.
        while len(self._samples) > 2 and self._samples[1].time_s <= self._clock() - WINDOW_S:
            self._samples.popleft()

    def _ttft_s(self, slot: int) -> float | None:
        oldest = self._samples[0]
        sum_us = self._counters.total(TTFT_SUM_US + slot)
        count = self._counters.total(TTFT_COUNT + slot)
        # A slot that was first used since then is beyond the sample.
        if slot < len(oldest.counts):
            sum_us -= oldest.sums_us[slot]
            count -= oldest.counts[slot]
        return sum_us / count / 1e6 if count > 0 else None

    def _sample(self) -> _Sample:
        num = self.slots.num_used
        return _Sample(
            time_s=self._clock(),
            sums_us=self._counters.totals(TTFT_SUM_US, num),
            counts=self._counters.totals(TTFT_COUNT, num),
        )

    def _is_idle(self, slot: int) -> bool:
        return self._counters.total(IN_FLIGHT + slot) == 0

    def _start_anew(self, slot: int) -> None:
        total = self._counters.total
        self._base[slot] = (total(SERVED + slot), total(FAILED + slot))
