"""All relay processes as the control process handles them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Self

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.counters import SharedCounters
from sgl_router_afd.dataplane.handle import RelayHandle
from sgl_router_afd.dataplane.messages import (
    MAX_MESSAGE_BYTES,
    BrokeOff,
    Table,
    Unreachable,
    encode,
    setup_of,
)

logger = logging.getLogger(__name__)

END_S = 5.0  # what a relay process gets to end beyond the time that running requests get


class Relays:
    """They run while the `with` block does; when one cannot be kept running, the block ends, too.

    Args:
        counters: Shared with all of them.
        listeners: For each its sockets.
        control_path: The Unix socket of the router's own endpoints.
        on_trouble: Told of servers that refuse connections or break off.
    """

    def __init__(
        self,
        config: RouterConfig,
        counters: SharedCounters,
        listeners: list[list[socket.socket]],
        control_path: str,
        on_trouble: Callable[[Unreachable | BrokeOff], None],
    ) -> None:
        self._handles = [
            RelayHandle(
                setup_of(config, relay, control_path),
                counters,
                sockets,
                on_trouble,
            )
            for relay, sockets in enumerate(listeners)
        ]
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        for handle in self._handles:
            self._tasks.append(self._group.create_task(handle.keep_running()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(kind, error, trace)

    async def wait_until_listening(self) -> None:
        for handle in self._handles:
            await handle.is_listening.wait()

    def publish(self, table: Table) -> None:
        """Make this the table of all relay processes, those that start later too."""
        encoded = encode(table)
        if len(encoded) > MAX_MESSAGE_BYTES:
            logger.error(
                "the table of %d servers and %d models has %d bytes, and relay processes take %d: "
                "requests go where they went before; let servers have fewer and shorter names of "
                "models",
                *(len(table.rows), len(table.models), len(encoded), MAX_MESSAGE_BYTES),
            )
            return
        for handle in self._handles:
            handle.send_table(encoded)

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing more, let running requests finish, and let the processes end."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s + END_S
        asked = [loop.create_task(handle.start_draining(timeout_s)) for handle in self._handles]
        answered, hung = await asyncio.wait(asked, timeout=timeout_s + END_S)
        for task in hung:
            task.cancel()
        if num_running := sum(task.result() for task in answered):
            logger.info("waiting up to %g s for %d running requests", timeout_s, num_running)
        _, late = await asyncio.wait(self._tasks, timeout=max(0.0, end_s - loop.time()))
        if late:
            logger.warning("%d relay processes do not end; killing them", len(late))
