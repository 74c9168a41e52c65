"""How many requests run at once, and who waits for one of them to end."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.counters import QUEUED, RUNNING, RelayCounters

if TYPE_CHECKING:
    from sgl_router_afd.dataplane.exchange import Exchange

# Another relay process says nothing when one of its requests ends, so the queue looks.
LOOK_AGAIN_S = 0.01


class Admission:
    """The limits hold for all relay processes together, by their shared counters.

    Two processes that let a request in at the same instant may pass the limit by one.
    """

    def __init__(self, config: RouterConfig, counters: RelayCounters) -> None:
        self._max_running = config.max_concurrent_requests
        self._max_queued = config.queue_size
        self._timeout_s = config.queue_timeout_s
        self._counters = counters
        self._queue: deque[tuple[float, Exchange]] = deque()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, exchange: Exchange) -> None:
        """Let the exchange in now or later, or refuse it."""
        shared = self._counters.shared
        if not self._queue and shared.total(RUNNING) < self._max_running:
            self._let_in(exchange)
        elif shared.total(QUEUED) < self._max_queued:
            self._counters.add(QUEUED)
            self._queue.append((self._loop.time() + self._timeout_s, exchange))
            self._look_later()
        else:
            exchange.refuse(
                429,
                f"{self._max_running} requests run and {self._max_queued} wait, as many as this "
                "router takes; send the request later, or start the router with a larger "
                "--max-concurrent-requests or --queue-size",
            )

    def release(self) -> None:
        """An exchange that was let in has ended."""
        self._counters.add(RUNNING, -1)
        if self._queue:
            self._look()

    def leave(self, exchange: Exchange) -> None:
        """An exchange gives up waiting."""
        for entry in self._queue:
            if entry[1] is exchange:
                self._queue.remove(entry)
                self._counters.add(QUEUED, -1)
                return

    def _look(self) -> None:
        while self._queue and self._counters.shared.total(RUNNING) < self._max_running:
            self._let_in(self._take_first())
        now_s = self._loop.time()
        while self._queue and self._queue[0][0] <= now_s:
            self._take_first().refuse(
                503,
                f"the request waited {self._timeout_s:g} s for one of {self._max_running} running "
                "requests to end; send it later, or to another router",
            )

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_AGAIN_S, self._look_now)

    def _look_now(self) -> None:
        self._timer = None
        self._look()
        if self._queue:
            self._look_later()

    def _take_first(self) -> Exchange:
        self._counters.add(QUEUED, -1)
        return self._queue.popleft()[1]

    def _let_in(self, exchange: Exchange) -> None:
        self._counters.add(RUNNING)
        exchange.on_admitted()
