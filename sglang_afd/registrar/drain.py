"""Ends a server in order: the router sends nothing more, what runs ends, then the server leaves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sglang_afd.registrar.registrar import Registrar

logger = logging.getLogger(__name__)

TURN_S = 0.1
# A relay may have chosen this server just before it heard; it tells within far less.
SETTLE_S = 0.5


class Drain:
    """Begins when it is made; ask `is_over` until it is.

    Args:
        registrar: Tells the router.
        is_idle: Has this server nothing to do, as far as it knows itself?
        timeout_s: It is over then in any case.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        registrar: Registrar,
        is_idle: Callable[[], bool],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registrar = registrar
        self._is_idle = is_idle
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline_s = clock() + timeout_s
        self._settled_s = clock() + SETTLE_S
        logger.info("draining for up to %g s", timeout_s)
        registrar.drain()

    def is_over(self) -> bool:
        """May the server end?"""
        now_s = self._clock()
        if now_s >= self._deadline_s:
            logger.warning("ending after --afd-drain-timeout %g s, unfinished", self._timeout_s)
            return True
        if now_s < self._settled_s or not self._is_idle():
            return False
        # Without a router that knows of the drain this server knows best itself.
        return self._registrar.may_stop is not False

    def wait(self) -> None:
        """Until it is over."""
        while not self.is_over():
            time.sleep(TURN_S)
