"""Into how many micro-batches a step is cut, learnt from measured steps (pure: numbers only).

Two micro-batches hide one's experts behind the other's attention, and read every expert's weights
twice. Which of the two weighs more depends on rows, model and peers, so it is measured: steps are
sorted into buckets of similar size, each number of micro-batches is tried a few times, and the
fastest is kept until another one is clearly faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

NUM_PROBES = 3  # steps with one number before it is judged; the median ignores one odd step
WINDOW = 5  # latest steps with one number that its median is taken of
PROBE_AGAIN_STEPS = 500  # of one bucket, between two looks at the numbers not in use
PROBE_SOONER_STEPS = 50  # the same once the number in use has become faster or slower
CHANGE = 0.2  # by this share
MARGIN = 0.05  # another number must be faster by this share
MIN_ROWS_DECODE = 2  # of each micro-batch; smaller steps are not cut
MIN_ROWS_PREFILL = 16  # the same for prefill


class Fixed:
    """The same number for every step that has the rows for it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def choose(self, num_rows: int, *, is_prefill: bool) -> int:
        """See `Measured`."""
        return min(self._number, num_rows)

    def observe(self, num_rows: int, number: int, duration_s: float, *, is_prefill: bool) -> None:
        """See `Measured`; nothing is learnt."""


@dataclass(slots=True)
class _Bucket:
    times_s: dict[int, deque[float]] = field(default_factory=dict)  # by number
    number: int = 1  # in use
    num_steps: int = 0  # since the last look at the other numbers
    usual_s: float = 0.0  # of the number in use, when that look was over; 0 before
    num_probes: dict[int, int] = field(default_factory=dict)  # left, by number


_UNKNOWN = _Bucket()  # of which nothing was measured; never changed


class Measured:
    """Deterministic in what `observe` was told; asking changes nothing.

    Args:
        numbers: Ascending, 1 first. One above 2 is tried only where the one before it is in use,
            since more than two rarely pay.
    """

    def __init__(self, numbers: Sequence[int] = (1, 2, 4)) -> None:
        self._numbers = tuple(numbers)
        self._buckets: dict[tuple[bool, int], _Bucket] = {}

    def choose(self, num_rows: int, *, is_prefill: bool) -> int:
        """How many micro-batches the next step of `num_rows` rows should have."""
        allowed = self._allowed(num_rows, is_prefill)
        bucket = self._buckets.get(_key(num_rows, is_prefill), _UNKNOWN)
        for number in self._worth_a_probe(bucket, allowed):
            if bucket.num_probes.get(number, NUM_PROBES) > 0:
                return number
        return bucket.number if bucket.number in allowed else allowed[-1]

    def observe(self, num_rows: int, number: int, duration_s: float, *, is_prefill: bool) -> None:
        """Learn how long a step took.

        Args:
            num_rows: Of the whole step.
            number: Of micro-batches that it really had.
            duration_s: Of its forward.
            is_prefill: Prefill and decode are learnt apart.
        """
        bucket = self._buckets.setdefault(_key(num_rows, is_prefill), _Bucket())
        times_s = bucket.times_s.setdefault(number, deque(maxlen=WINDOW))
        times_s.append(duration_s)
        left = bucket.num_probes.get(number, NUM_PROBES)
        bucket.num_probes[number] = max(0, left - 1)
        _decide(bucket)
        bucket.num_steps += 1
        if _is_stale(bucket):
            bucket.num_steps, bucket.usual_s = 0, 0.0
            bucket.num_probes = {
                other: NUM_PROBES if other != bucket.number else 0 for other in bucket.times_s
            }

    def _allowed(self, num_rows: int, is_prefill: bool) -> list[int]:
        least = MIN_ROWS_PREFILL if is_prefill else MIN_ROWS_DECODE
        return [number for number in self._numbers if number == 1 or num_rows // number >= least]

    def _worth_a_probe(self, bucket: _Bucket, allowed: Sequence[int]) -> Sequence[int]:
        def is_worth_it(index: int) -> bool:
            return index < 2 or bucket.number >= self._numbers[index - 1]

        return [number for index, number in enumerate(allowed) if is_worth_it(index)]


def build_choice(setting: str, numbers: Sequence[int] = (1, 2, 4)) -> Fixed | Measured:
    """What `--afd-num-micro-batches` asks for: `auto`, which tries `numbers`, or a number."""
    return Measured(numbers) if setting == "auto" else Fixed(int(setting))


def _decide(bucket: _Bucket) -> None:
    judged = {
        number: median(times_s)
        for number, times_s in bucket.times_s.items()
        if bucket.num_probes.get(number, NUM_PROBES) == 0
    }
    if bucket.number not in judged:
        return
    fastest = min(judged, key=lambda number: (judged[number], number))
    if judged[fastest] < judged[bucket.number] * (1 - MARGIN):
        bucket.number = fastest


def _is_stale(bucket: _Bucket) -> bool:
    if bucket.num_steps >= PROBE_AGAIN_STEPS:
        return True
    times_s = bucket.times_s.get(bucket.number)
    if bucket.num_steps < PROBE_SOONER_STEPS or not times_s:
        return False
    now_s = median(times_s)
    bucket.usual_s = bucket.usual_s or now_s
    return abs(now_s - bucket.usual_s) > CHANGE * bucket.usual_s


def _key(num_rows: int, is_prefill: bool) -> tuple[bool, int]:
    return is_prefill, num_rows.bit_length()
