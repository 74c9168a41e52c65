"""A server as one relay process sees it: address, load, requests, idle connections."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from typing import TYPE_CHECKING

from yarl import URL

from sgl_router_afd.dataplane.upstream import UpstreamConnection, describe

if TYPE_CHECKING:
    from sgl_router_afd.control.policy import Candidate
    from sgl_router_afd.dataplane.exchange import Exchange
    from sgl_router_afd.dataplane.reading import ReadBuffer

# SGLang closes idle connections after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE); letting go of them well
# before keeps a request from being written to a connection that is being closed.
IDLE_CONNECTION_S = 2.0


class Server:
    """Gives exchanges connections, kept or new.

    Args:
        url: http(s)://host:port, or the path of a Unix socket.
        slot: Its place in the table and in the counters; -1 for the control process.
    """

    candidate: Candidate  # as the table says; the control process has none

    def __init__(
        self, url: str, slot: int, reading: ReadBuffer, *, connect_timeout_s: float
    ) -> None:
        self.url = url
        self.slot = slot
        self.is_out = False  # it refused a connection since the last table
        self.exchanges: set[Exchange] = set()  # that it has in flight
        self.reported_s = -math.inf  # when its trouble was told last
        self._reading = reading
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[UpstreamConnection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        parsed = URL(url)
        self._address = (parsed.host or "", parsed.port or 0)
        self._tls = ssl.create_default_context() if parsed.scheme == "https" else None
        self.host = url.partition("://")[2].encode() if parsed.scheme else b"router"

    def take_idle(self) -> UpstreamConnection | None:
        """The kept connection that was used last, if it is fresh enough."""
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since_s > IDLE_CONNECTION_S:
                connection.abort()
                self.close_idle()
            elif connection.is_quiet:
                return connection
            else:
                connection.abort()
        return None

    def put_idle(self, connection: UpstreamConnection) -> None:
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """It is closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self, idle_s: float = 0.0) -> None:
        """Close the kept connections that were not used for so long."""
        last = time.monotonic() - idle_s
        old = [connection for connection in self._idle if connection.idle_since_s <= last]
        self._idle = [connection for connection in self._idle if connection.idle_since_s > last]
        for connection in old:
            connection.abort()

    def connect(self, exchange: Exchange) -> None:
        """Open a connection for the exchange, which hears how that went."""
        task = asyncio.get_running_loop().create_task(self._connect(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._open()
        except OSError as error:  # a time-out is one, too
            exchange.on_not_connected(self, describe(error))
        else:
            exchange.on_connected(self, connection)

    async def _open(self) -> UpstreamConnection:
        def protocol() -> UpstreamConnection:
            return UpstreamConnection(self, self._reading)

        loop = asyncio.get_running_loop()
        if self._address[0]:
            _, connection = await loop.create_connection(protocol, *self._address, ssl=self._tls)
        else:
            _, connection = await loop.create_unix_connection(protocol, self.url)
        return connection
