"""Relay processes without a control plane: a test gives them their tables, and hears what they say.

They are the real processes; only who decides is the test.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, Self

import msgspec
from aiohttp import web
from raw_http import ask, post
from raw_server import RawServer, wait_until

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.control.standing import Standing
from sgl_router_afd.dataplane.counters import SharedCounters
from sgl_router_afd.dataplane.listen import open_listeners
from sgl_router_afd.dataplane.messages import (
    NO_TABLE,
    BrokeOff,
    ModelRow,
    ServerRow,
    Table,
    Unreachable,
)
from sgl_router_afd.dataplane.supervisor import Relays

DEADLINE_S = 20.0
CONTROL_ANSWER = b"answer of the control process"
UNKNOWN = ModelRow(slots=(), http_status=404, reason="")
AMBIGUOUS = ModelRow(slots=(), http_status=400, reason="the request names no model")


def row(slot: int, server: RawServer, state: str = Standing.SERVING, **load: Any) -> ServerRow:
    return ServerRow(
        slot=slot, server_id=f"attn-{slot}", url=server.url, state=state, reason="", **load
    )


def table(
    rows: Sequence[ServerRow],
    models: dict[str, ModelRow],
    unnamed: ModelRow = AMBIGUOUS,
    unknown: ModelRow = UNKNOWN,
) -> Table:
    return Table(rows=tuple(rows), models=models, unnamed=unnamed, unknown=unknown)


class RelayRig:
    """Relay processes on a port, for the length of a block.

    Args:
        settings: Of `RouterConfig`, beside what every test here needs.
    """

    def __init__(self, **settings: Any) -> None:
        self.config = RouterConfig(port=0, **({"relay_processes": 1} | settings))
        self.counters = SharedCounters.create(self.config.num_relays)
        self.told: list[Unreachable | BrokeOff] = []  # by the relay processes
        self._num_tables = 0
        self.controlled: list[str] = []  # targets that the control process got

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)))
        self._thread.start()
        assert started.wait(DEADLINE_S), "the relay processes never listened"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def publish(self, new: Table) -> None:
        """Make this the table, and return when the relay process has taken it.

        It knows a model more then, of a name that no table had before.
        """
        self._num_tables += 1
        name = f"table-{self._num_tables}"
        nobody = ModelRow(slots=(), http_status=503, reason="it only tells the table")
        self.publish_as_is(msgspec.structs.replace(new, models={**new.models, name: nobody}))
        wait_until("the table is known", lambda: self._knows(name))

    def publish_as_is(self, new: Table) -> None:
        """Make this the table soon."""
        self._loop.call_soon_threadsafe(self._relays.publish, new)

    def _knows(self, name: str) -> bool:
        reply = ask(self.address, post(body=b'{"model": "%b"}' % name.encode()))
        return reply.status == 503 and b"it only tells" in reply.body

    def total(self, cell: int) -> int:
        return self.counters.total(cell)

    def wait_for(self, what: str, cell: int, number: int) -> None:
        """Until a counter is at the number."""
        wait_until(what, lambda: self.total(cell) == number)

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        listeners = open_listeners(self.config.host, 0, self.config.num_relays)
        self.address: tuple[str, int] = listeners[0][0].getsockname()[:2]
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "control")
            await web.UnixSite(runner, path).start()
            relays = Relays(self.config, self.counters, listeners, path, self.told.append)
            async with relays:
                self._relays = relays
                relays.publish(NO_TABLE)
                await relays.wait_until_listening()
                started.set()
                await self._stopped.wait()
                await relays.drain(0.0)
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.controlled.append(request.raw_path)
        return web.Response(body=CONTROL_ANSWER)
