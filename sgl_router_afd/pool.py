"""The attention servers that the router was given: their states, loads and turns (no I/O)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sgl_router_afd.policy import Policy
from sgl_router_afd.readiness import TAKES_REQUESTS, ServerState, Verdict

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Server:
    """One attention server as the router sees it; changed only by `ServerPool`."""

    url: str
    index: int  # position in the pool; decides turns
    state: ServerState = ServerState.UNKNOWN
    reason: str = "not polled yet"
    num_in_flight: int = 0  # requests relayed there and not yet answered in full
    num_served: int = 0  # responses relayed to their end, whatever their HTTP status
    num_missed_polls: int = 0  # unanswered polls since the last answer
    last_seen_s: float | None = None  # the pool's clock at the last answered poll


class ServerPool:
    """Records verdicts and picks servers.

    Args:
        urls: The servers, in the order in which they take turns.
        policy: Ranks those that may get a request.
        max_missed_polls: Unanswered polls in a row after which a server with traffic is
            unreachable; one whose event loop is busy for a moment keeps its traffic.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        policy: Policy,
        *,
        max_missed_polls: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = tuple(Server(url=url, index=index) for index, url in enumerate(urls))
        self._policy = policy
        self._max_missed_polls = max_missed_polls
        self._clock = clock
        self._last_index = -1

    @property
    def num_ready(self) -> int:
        return sum(server.state is ServerState.READY for server in self.servers)

    def pick(self, *, excluding: Collection[str] = ()) -> Server | None:
        """The server whose turn it is, or None; servers in `excluding` are left out.

        A stalled one, which would hold the request, is picked only where none is ready.
        """
        for state in TAKES_REQUESTS:
            candidates = [
                server
                for server in self.servers
                if server.state is state and server.url not in excluding
            ]
            if candidates:
                chosen = min(
                    candidates,
                    key=lambda server: self._policy(server.num_in_flight, self._turns_away(server)),
                )
                self._last_index = chosen.index
                return chosen
        return None

    @contextmanager
    def lease(self, server: Server) -> Iterator[None]:
        """Count one request as in flight at the server."""
        server.num_in_flight += 1
        try:
            yield
        finally:
            server.num_in_flight -= 1

    def record_answer(self, server: Server, verdict: Verdict) -> None:
        """The server answered a poll."""
        server.last_seen_s = self._clock()
        server.num_missed_polls = 0
        self._enter(server, verdict.state, verdict.reason)

    def record_silence(self, server: Server, reason: str) -> None:
        """The server left a poll unanswered, though a connection was not refused."""
        server.num_missed_polls += 1
        has_traffic = server.state in TAKES_REQUESTS
        if not has_traffic or server.num_missed_polls >= self._max_missed_polls:
            self._enter(server, ServerState.UNREACHABLE, reason)

    def record_served(self, server: Server) -> None:
        """A response of `server` was relayed to its end."""
        server.num_served += 1

    def record_unreachable(self, server: Server, reason: str) -> None:
        """No connection to the server can be had; the next answered poll brings it back."""
        self._enter(server, ServerState.UNREACHABLE, reason)

    def last_seen_ago_s(self, server: Server) -> float | None:
        return None if server.last_seen_s is None else self._clock() - server.last_seen_s

    def explain(self) -> str:
        """Name every server with its state and reason, for an error message."""
        return "; ".join(
            f"{server.url} is {server.state}" + (f" ({server.reason})" if server.reason else "")
            for server in self.servers
        )

    def _turns_away(self, server: Server) -> int:
        return (server.index - self._last_index - 1) % len(self.servers)

    def _enter(self, server: Server, state: ServerState, reason: str) -> None:
        if (state, reason) != (server.state, server.reason):
            is_news = ServerState.READY in (state, server.state)
            logger.log(
                logging.INFO if state is ServerState.READY or not is_news else logging.WARNING,
                "%s is %s%s",
                server.url,
                state,
                f": {reason}" if reason else "",
            )
        server.state, server.reason = state, reason
