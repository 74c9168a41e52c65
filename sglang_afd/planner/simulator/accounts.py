"""Where the time of an attention server goes: ten accounts that add up to all of it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class TimeShares:
    """Shares of the time of attention servers; they add up to 1."""

    attention: float  # computes
    outside: float  # head, sampling, start of the next step
    experts: float  # waits while its own unit runs
    exchange: float  # waits for rows or results on their way
    barrier: float  # its rows are there, those of a slower peer are not
    queue: float  # all rows are there, the rank runs something else
    round: float  # waits at the first layer for a round to start
    fill: float  # the last layer: nothing is left that could overlap
    prefill: float  # decodes nothing since it prefills
    failure: float  # MLP servers, or itself, away


NAMES = tuple(field.name for field in fields(TimeShares))


class Account:
    """Sums in microseconds; the waits of the last layer are kept apart until the end."""

    __slots__ = ("last", "num_layers", "sums")

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.sums = dict.fromkeys(NAMES, 0.0)
        self.last = dict.fromkeys(NAMES, 0.0)

    def add(self, other: Account) -> None:
        """Take another account in."""
        for name in NAMES:
            self.sums[name] += other.sums[name]
            self.last[name] += other.last[name]

    def clear(self) -> None:
        """Back to nothing."""
        for name in NAMES:
            self.sums[name] = self.last[name] = 0.0

    @property
    def total_us(self) -> float:
        """Of all accounts."""
        return sum(self.sums.values()) + sum(self.last.values())

    def shares(self) -> TimeShares:
        """The last layer waits for what other layers overlap: what is above their mean is fill."""
        total = self.total_us or 1.0
        sums = dict(self.sums)
        for name in ("experts", "exchange", "queue"):
            usual = self.sums[name] / max(self.num_layers - 1, 1)
            fill = max(0.0, self.last[name] - usual) if self.num_layers > 1 else 0.0
            sums["fill"] += fill
            sums[name] += self.last[name] - fill
        for name in set(NAMES) - {"experts", "exchange", "queue"}:
            sums[name] += self.last[name]
        return TimeShares(**{name: sums[name] / total for name in NAMES})
