"""The attention servers that the router was given, and their states (no I/O)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_router_afd.control.standing import Standing
from sgl_router_afd.dataplane.messages import UNPLACED, ModelRow, ServerRow, Table
from sgl_router_afd.readiness import (
    HOLDS_REQUESTS,
    KEEPS_THROUGH_SILENCE,
    ServerState,
    Verdict,
)

logger = logging.getLogger(__name__)

STANDINGS = {
    ServerState.READY: Standing.SERVING.value,
    ServerState.STALLED: Standing.DEGRADED.value,
    ServerState.DETACHED: Standing.DEGRADED.value,
    ServerState.STARTING: Standing.WAITING.value,
}


@dataclass(kw_only=True)
class Server:
    """One attention server as the control process sees it; changed only by `ServerPool`."""

    url: str
    slot: int  # position in the pool; decides turns
    state: ServerState = ServerState.UNKNOWN
    reason: str = "not polled yet"
    num_missed_polls: int = 0  # unanswered polls since the last answer
    last_seen_s: float | None = None  # the pool's clock at the last answered poll


class ServerPool:
    """Records verdicts, and publishes every change as a new table.

    Args:
        urls: The servers, in the order in which they take turns.
        max_missed_polls: Unanswered polls in a row after which a server with traffic is
            unreachable; one whose event loop is busy for a moment keeps its traffic.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_missed_polls: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = tuple(Server(url=url, slot=slot) for slot, url in enumerate(urls))
        self._max_missed_polls = max_missed_polls
        self._clock = clock
        self._publish: Callable[[Table], None] = lambda table: None

    @property
    def num_ready(self) -> int:
        return sum(server.state is ServerState.READY for server in self.servers)

    def publish_to(self, publish: Callable[[Table], None]) -> None:
        """Call `publish` with the table now, and with every later one."""
        self._publish = publish
        publish(self.table())

    def table(self) -> Table:
        """What the relay processes need to know."""
        anybody = ModelRow(
            slots=tuple(
                server.slot for server in self.servers if server.state is ServerState.READY
            ),
            may_wait=any(server.state in HOLDS_REQUESTS for server in self.servers),
            reason="; ".join(
                f"{server.url} is {server.state}" + (f" ({server.reason})" if server.reason else "")
                for server in self.servers
            ),
        )
        return Table(
            rows=tuple(
                ServerRow(
                    slot=server.slot,
                    server_id=server.url,
                    url=server.url,
                    state=STANDINGS.get(server.state, UNPLACED),
                    reason=server.reason,
                )
                for server in self.servers
            ),
            models={},
            unnamed=anybody,
            unknown=anybody,
        )

    def record_answer(self, server: Server, verdict: Verdict) -> None:
        """The server answered a poll."""
        server.last_seen_s = self._clock()
        server.num_missed_polls = 0
        self._enter(server, verdict.state, verdict.reason)

    def record_silence(self, server: Server, reason: str) -> None:
        """The server left a poll unanswered, though a connection was not refused."""
        server.num_missed_polls += 1
        keeps = server.state in KEEPS_THROUGH_SILENCE
        if not keeps or server.num_missed_polls >= self._max_missed_polls:
            self._enter(server, ServerState.UNREACHABLE, reason)

    def record_unreachable(self, server: Server, reason: str) -> None:
        """No connection to the server can be had; the next answered poll brings it back."""
        self._enter(server, ServerState.UNREACHABLE, reason)

    def last_seen_ago_s(self, server: Server) -> float | None:
        return None if server.last_seen_s is None else self._clock() - server.last_seen_s

    def _enter(self, server: Server, state: ServerState, reason: str) -> None:
        if (state, reason) == (server.state, server.reason):
            return
        is_news = ServerState.READY in (state, server.state)
        logger.log(
            logging.INFO if state is ServerState.READY or not is_news else logging.WARNING,
            "%s is %s%s",
            server.url,
            state,
            f": {reason}" if reason else "",
        )
        server.state, server.reason = state, reason
        self._publish(self.table())
