"""Requests that wait for a server to get ready."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sgl_router_afd.dataplane.counters import HELD, RelayCounters

if TYPE_CHECKING:
    from sgl_router_afd.dataplane.exchange import Exchange


class WaitingRoom:
    """Wakes everybody when the table changed, in the order in which they came."""

    def __init__(self, timeout_s: float, counters: RelayCounters) -> None:
        self.timeout_s = timeout_s
        self._counters = counters
        self._timers: dict[Exchange, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()

    def enter(self, exchange: Exchange, until_s: float) -> None:
        """Hold the exchange; it hears `choose` or, at loop time `until_s`, `on_held_too_long`."""
        self._counters.add(HELD)
        self._timers[exchange] = self._loop.call_at(until_s, self._give_up, exchange)

    def leave(self, exchange: Exchange) -> None:
        timer = self._timers.pop(exchange, None)
        if timer is not None:
            timer.cancel()
            self._counters.add(HELD, -1)

    def wake(self) -> None:
        """Some may have a server now, or nothing to hope for."""
        for exchange in list(self._timers):
            if exchange in self._timers:
                self.leave(exchange)
                exchange.choose()

    def _give_up(self, exchange: Exchange) -> None:
        self.leave(exchange)
        exchange.on_held_too_long()
