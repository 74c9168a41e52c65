"""How many more servers of a fleet may end because another takes their place."""

from __future__ import annotations


class Spares:
    """Counts down; a server that ends while the fleet still starts is a failure all the same.

    Args:
        count: Spares that were started.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self._has_started = False

    def open(self) -> None:
        """Every server was ready once."""
        self._has_started = True

    def take(self) -> bool:
        """A server ended: is there a spare for it?"""
        if not self._has_started or self.left == 0:
            return False
        self.left -= 1
        return True
