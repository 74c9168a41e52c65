"""A mean that forgets slowly (pure)."""

from __future__ import annotations


class RunningMean:
    """Exponential mean; the first value counts whole."""

    __slots__ = ("_share", "value")

    def __init__(self, share: float = 0.125) -> None:
        self._share = share
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Take one more measurement in."""
        if self.value is None:
            self.value = value
        else:
            self.value += self._share * (value - self.value)
