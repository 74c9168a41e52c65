"""How many requests may be sent a second time (pure)."""

from __future__ import annotations

# What a server that dies with many requests needs at once; replays beyond are a share of traffic.
RESERVE = 256.0


class RetryBudget:
    """Keeps the replays of a bad day from doubling the load of the servers that are left.

    Args:
        share: Replays for each request, 0 for none at all.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = RESERVE if share else 0.0

    def earn(self) -> None:
        """A request came."""
        self._left = min(RESERVE, self._left + self._share) if self._share else 0.0

    def spend(self) -> bool:
        """Whether one may be sent again now."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
