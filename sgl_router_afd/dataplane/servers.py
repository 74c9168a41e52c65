"""The servers as one relay process knows them, and which of them gets a request."""

from __future__ import annotations

from collections.abc import Callable, Collection

from sgl_router_afd.dataplane.counters import IN_FLIGHT, SharedCounters
from sgl_router_afd.dataplane.messages import ServerRow, Table
from sgl_router_afd.dataplane.server import Server
from sgl_router_afd.policy import Policy
from sgl_router_afd.readiness import HOLDS_REQUESTS, ServerState


class Servers:
    """Follows the tables of the control process.

    Args:
        policy: Ranks those that may get a request.
        counters: Of all relay processes.
        open_server: Makes the server of a row.
        on_ready: Called when a server became ready.
    """

    def __init__(
        self,
        policy: Policy,
        counters: SharedCounters,
        open_server: Callable[[ServerRow], Server],
        on_ready: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._counters = counters
        self._open_server = open_server
        self._on_ready = on_ready
        self._servers: dict[int, Server] = {}
        self._ready: list[Server] = []
        self._num_slots = 0

    def take(self, table: Table) -> None:
        """Replace what was known before."""
        gone = self._servers.keys() - {row.slot for row in table.rows}
        for slot in gone:
            self._servers.pop(slot).close_idle()
        for row in table.rows:
            if row.slot not in self._servers:
                self._servers[row.slot] = self._open_server(row)
            server = self._servers[row.slot]
            server.state, server.reason = row.state, row.reason
        self._num_slots = 1 + max(self._servers, default=-1)
        self._sort_out()

    def mark_unreachable(self, server: Server, reason: str) -> None:
        """It gets no request until a table says otherwise."""
        server.state, server.reason = ServerState.UNREACHABLE, reason
        self._sort_out()

    def pick(self, *, excluding: Collection[int] = ()) -> Server | None:
        """The ready server whose turn it is, or None; slots in `excluding` are left out."""
        candidates = self._ready
        if excluding:
            candidates = [server for server in candidates if server.slot not in excluding]
        if not candidates:
            return None
        in_flight = self._counters.totals(IN_FLIGHT, self._num_slots)
        turn, num, policy = self._counters.turn, self._num_slots, self._policy
        chosen = min(
            candidates,
            key=lambda server: policy(in_flight[server.slot], (server.slot - turn) % num),
        )
        self._counters.turn = chosen.slot + 1
        return chosen

    def may_get_ready(self) -> bool:
        """Whether some server is in a state that a request can wait out."""
        return any(server.state in HOLDS_REQUESTS for server in self._servers.values())

    def has_other(self, tried: Collection[int]) -> bool:
        """Whether a request that was sent to `tried` in vain can hope for another server."""
        return any(server.slot not in tried for server in self._ready) or self.may_get_ready()

    def explain(self) -> str:
        """Name every server with its state and reason, for an error message."""
        return "; ".join(
            f"{server.url} is {server.state}" + (f" ({server.reason})" if server.reason else "")
            for _, server in sorted(self._servers.items())
        )

    def close_idle(self, idle_s: float) -> None:
        for server in self._servers.values():
            server.close_idle(idle_s)

    def _sort_out(self) -> None:
        before = self._ready
        self._ready = [
            server
            for _, server in sorted(self._servers.items())
            if server.state is ServerState.READY
        ]
        if any(server not in before for server in self._ready):
            self._on_ready()
