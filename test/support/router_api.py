"""The router's API over a real fleet, with clocks that only tests move."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from router_servers import FakeServer, a_plane, pass_probes

from sgl_router_afd.api.routes import add_routes
from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.counters import (
    FAILED,
    IN_FLIGHT,
    SERVED,
    RelayCounters,
    SharedCounters,
)
from sgl_router_afd.dataplane.messages import ServerRow, Table
from sgl_router_afd.fleet import Fleet
from sgl_router_afd.keys import Key
from sgl_router_afd.traffic import TrafficBook
from sglang_afd.protocol.registration import ToRouter, encode

WALL_S = 1_000_000.0


@dataclass
class Timer:
    """A call that is due some time."""

    call: Callable[[], None] | None

    def cancel(self) -> None:
        self.call = None


@dataclass(frozen=True)
class Reply:
    """An answer, which was found to be as the OpenAPI document says."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"]["message"])


@dataclass
class RouterApi:
    """A fleet and the API over it."""

    config: RouterConfig
    now_s: float = 0.0
    wall_s: float = WALL_S
    tables: list[Table] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)
    documents: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        counters = SharedCounters.create(1)
        self.counters = RelayCounters(counters, 0)
        book = TrafficBook(counters, self._clock)
        self.plane = a_plane()
        self.fleet = Fleet(
            self.plane,
            book,
            counters,
            boot_id="router",
            clock=self._clock,
            call_later=self._call_later,
        )
        self.fleet.publish_to(self.tables.append)
        self._book = book

    def _clock(self) -> float:
        return self.now_s

    def _call_later(self, wait_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        if wait_s < 1:  # what the fleet does at once; what waits for the clock is not for here
            self.timers.append(timer)
            with suppress(RuntimeError):  # no loop runs while a test speaks to the plane itself
                asyncio.get_running_loop().call_soon(self.publish)
        return timer

    def add_to(self, app: web.Application) -> None:
        add_routes(app, self.fleet, self.config, wall_clock=lambda: self.wall_s)

    def row(self, server_id: str) -> ServerRow:
        """What relay processes have been told of a server."""
        self.publish()
        return next(row for row in self.tables[-1].rows if row.server_id == server_id)

    def publish(self) -> None:
        """Let the fleet do what it does soon."""
        timers, self.timers = self.timers, []
        for timer in timers:
            if timer.call is not None:
                timer.call()

    def count(
        self, server_id: str, *, in_flight: int = 0, served: int = 0, failed: int = 0
    ) -> None:
        """As if the relay had done that."""
        self.publish()
        slot = self._book.slots.of(server_id)
        assert slot is not None, f"{server_id} has no slot"
        for row, number in ((IN_FLIGHT, in_flight), (SERVED, served), (FAILED, failed)):
            self.counters.add(row + slot, number)

    def join(self, *servers: FakeServer) -> None:
        """Register servers and pass their probes, as if they had come over HTTP."""
        for server in servers:
            server.register(self.plane, self.now_s)
        pass_probes(self.plane, self.now_s)
        self.fleet.changed()
        self.publish()


class ServedApi(RouterApi):
    """The same, and requests to it."""

    client: TestClient[web.Request, web.Application]
    runner: asyncio.Runner

    def ask(
        self, method: str, path: str, body: object = None, *, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send a request; a body that is no bytes goes as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        reply = self.runner.run(self._ask(method, path, data, headers or {}))
        self._check_documented(method, path, reply)
        return reply

    def send(self, message: ToRouter, *, headers: dict[str, str] | None = None) -> Reply:
        """Send a server's message."""
        return self.ask("POST", "/afd/v1/servers", encode(message), headers=headers)

    def document(self) -> Any:
        if not self.documents:
            self.documents.append(self.runner.run(self._ask("GET", "/openapi.json", None, {})).json)
        return self.documents[0]

    async def _ask(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> Reply:
        async with self.client.request(method, path, data=data, headers=headers) as answer:
            return Reply(answer.status, dict(answer.headers), await answer.read())

    def _check_documented(self, method: str, path: str, reply: Reply) -> None:
        document = self.document()
        operation = _operation(document, method, path.partition("?")[0])
        if operation is None:
            assert reply.status >= 400, f"{method} {path} answers and is not documented"
            return
        told = operation["responses"].get(str(reply.status))
        assert told is not None, f"{method} {path} answered {reply.status}, which no document says"
        if "content" in told and method != "HEAD":
            schema = told["content"]["application/json"]["schema"]
            jsonschema.Draft202012Validator(
                {**schema, "components": document["components"]}
            ).validate(reply.json)


@contextmanager
def serving(
    *,
    secret: str = "",
    api_key: str = "",
    admin_api_key: str = "",
    more: Callable[[web.Application], None] = lambda app: None,
    **settings: Any,
) -> Iterator[ServedApi]:
    """Serve the API of a router with these settings; `more` adds other routes."""
    config = RouterConfig(
        afd_secret=Key(secret.encode()),
        api_key=Key(api_key.encode()),
        admin_api_key=Key(admin_api_key.encode()),
        **settings,
    )
    api = ServedApi(config)
    app = web.Application(client_max_size=config.max_body_bytes)
    more(app)
    api.add_to(app)
    with asyncio.Runner() as runner:
        api.runner, api.client = runner, runner.run(_client(app))
        try:
            yield api
        finally:
            runner.run(api.client.close())


async def _client(app: web.Application) -> TestClient[web.Request, web.Application]:
    client = TestClient(TestServer(app))
    await client.start_server()
    return client


def _operation(document: Any, method: str, path: str) -> Any:
    method = "get" if method == "HEAD" else method.lower()
    for template, operations in document["paths"].items():
        pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template))
        if re.fullmatch(pattern, path) and method in operations:
            return operations[method]
    return None
