"""What the connections of one relay process share."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.control.policy import POLICIES
from sgl_router_afd.dataplane.admission import Admission
from sgl_router_afd.dataplane.budget import RetryBudget
from sgl_router_afd.dataplane.checks import Limits
from sgl_router_afd.dataplane.client import ClientConnection
from sgl_router_afd.dataplane.counters import RelayCounters
from sgl_router_afd.dataplane.messages import BrokeOff, ServerRow, Unreachable
from sgl_router_afd.dataplane.reading import ReadBuffer
from sgl_router_afd.dataplane.server import IDLE_CONNECTION_S, Server
from sgl_router_afd.dataplane.servers import Servers
from sgl_router_afd.dataplane.waiting import WaitingRoom

logger = logging.getLogger(__name__)

LOOK_AT_DEADLINES_S = 0.2
REPORT_AGAIN_S = 0.2


class Relay:
    """One relay process's parts, put together.

    Args:
        config: The router's settings.
        counters: This process's.
        control_path: The Unix socket behind the router's own endpoints.
        tell: Told of servers that refuse connections or break off.
    """

    def __init__(
        self,
        config: RouterConfig,
        counters: RelayCounters,
        control_path: str,
        tell: Callable[[Unreachable | BrokeOff], None],
    ) -> None:
        self.config = config
        self.loop = asyncio.get_running_loop()
        self.counters = counters
        self.reading = ReadBuffer()
        self.limits = Limits(
            max_headers=config.max_headers,
            max_header_bytes=config.max_header_bytes,
            max_body_bytes=config.max_body_bytes,
        )
        self.max_kept_body_bytes = config.max_replay_body_bytes
        self.clients: set[ClientConnection] = set()
        self.admission = Admission(config, counters)
        self.budget = RetryBudget(config.retry_budget)
        self.waiting = WaitingRoom(config.hold_timeout_s, counters)
        self.servers = Servers(
            POLICIES[config.policy], counters.shared, self._open_server, self.waiting.wake
        )
        self.control = Server(
            control_path, -1, self.reading, connect_timeout_s=config.connect_timeout_s
        )
        self.is_sticky = config.policy == "prefix"
        self.is_draining = False
        self._tell = tell
        self._id_prefix = secrets.token_hex(6)
        self._num_ids = 0

    def new_request_id(self) -> bytes:
        """One that no other request has, nor one of another process."""
        self._num_ids += 1
        return b"%b-%x" % (self._id_prefix.encode(), self._num_ids)

    def count_server(self, server: Server, row: int, amount: int = 1) -> None:
        """Count for a server; `row` is one of the counters' rows by slot."""
        if server.slot >= 0:
            self.counters.add(row + server.slot, amount)

    def report_unreachable(self, server: Server, reason: str) -> None:
        """It refused a connection: nothing goes there until the control process says so."""
        self.servers.mark_unreachable(server)
        self._tell(Unreachable(slot=server.slot, reason=reason))

    def report_broken(self, server: Server, reason: str) -> None:
        """It broke off; one that dies breaks off everything at once, which is news only once."""
        now_s = self.loop.time()
        if now_s - server.reported_s >= REPORT_AGAIN_S:
            server.reported_s = now_s
            self._tell(BrokeOff(slot=server.slot, reason=reason))

    async def watch_deadlines(self) -> None:
        """One look at all connections now and then is cheaper than a timer for each request."""
        while True:
            await asyncio.sleep(LOOK_AT_DEADLINES_S)
            now_s = self.loop.time()
            for client in list(self.clients):
                if client.deadline_s is not None and client.deadline_s <= now_s:
                    client.on_deadline()
            self.servers.close_idle(IDLE_CONNECTION_S)
            self.control.close_idle(IDLE_CONNECTION_S)

    def start_draining(self) -> int:
        """Close what is idle; returns how many requests still run."""
        self.is_draining = True
        for client in list(self.clients):
            client.on_drain()
        return sum(not client.is_idle for client in self.clients)

    async def drained(self, timeout_s: float) -> int:
        """Wait for the end of what runs, then cut what is left; returns how much that was."""
        deadline_s = self.loop.time() + timeout_s
        while self.clients and self.loop.time() < deadline_s:
            await asyncio.sleep(0.01)
        late = [client for client in self.clients if not client.is_idle]
        for client in list(self.clients):
            client.cut()
        return len(late)

    def _open_server(self, row: ServerRow) -> Server:
        return Server(
            row.url, row.slot, self.reading, connect_timeout_s=self.config.connect_timeout_s
        )
