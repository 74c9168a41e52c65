"""A fleet for the status page: a real control plane, servers that speak to it, the real page."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

import msgspec
from aiohttp import web
from loop_thread import LoopThread
from router_servers import FakeServer, a_plane

from sgl_router_afd.api.shapes import GroupsAnswer
from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.ratio import Ratio
from sgl_router_afd.page import add_routes
from sglang_afd.config import Role
from sglang_afd.ports import hold_free_ports
from sglang_afd.protocol.registration import Load


@dataclass(frozen=True)
class TrafficOf:
    """Requests at one server."""

    num_in_flight: int = 0
    num_served: int = 0
    num_failed: int = 0
    ttft_s: float | None = None


@dataclass
class FakeFleet:
    """What the API needs, around a real control plane whose clock the test moves."""

    plane: ControlPlane = field(default_factory=lambda: a_plane(ratio=Ratio(num_attn=2, num_mlp=1)))
    clock_s: float = 0.0
    traffics: dict[str, TrafficOf] = field(default_factory=dict)
    never_heard: tuple[tuple[str, str], ...] = ()
    boot_id: str = "router-boot"
    started_s: float = 0.0
    num_waiting: int = 0

    def now_s(self) -> float:
        return self.clock_s

    def changed(self) -> None:
        """Nobody else to tell."""

    def traffic(self, server_id: str) -> TrafficOf:
        return self.traffics.get(server_id, TrafficOf())

    def num_in_flight_then(self, server_id: str) -> int:
        return self.traffic(server_id).num_in_flight

    def num_requests_in_flight(self) -> int:
        return sum(one.num_in_flight for one in self.traffics.values())

    def num_requests_waiting(self) -> int:
        return self.num_waiting

    def is_static(self, server_id: str) -> bool:
        return False

    def statics(self) -> tuple[tuple[str, Role], ...]:
        return ()

    def unheard(self) -> tuple[tuple[str, str], ...]:
        return self.never_heard

    def add_static(self, url: str, role: Role) -> None:
        raise AssertionError("the page changes nothing")

    def remove_static(self, url: str) -> bool:
        raise AssertionError("the page changes nothing")


def busy(
    server: FakeServer,
    *,
    running: int = 0,
    waiting: int = 0,
    free_kv: int = 10_000,
    tokens_per_s: float = 0.0,
    imbalance: float = 0.0,
) -> FakeServer:
    """A server whose next report says this load."""
    load = Load(
        num_running=running,
        num_waiting=waiting,
        free_kv_tokens=free_kv,
        tokens_per_s=tokens_per_s,
        expert_imbalance=imbalance,
    )
    return server.says(load=load)


class PageServer:
    """The page in an aiohttp application, beside an answer of /afd/v1/groups that a test sets.

    It listens for the length of a block, and its port is nobody else's while it is stopped in it.

    Args:
        loop: Runs it.
    """

    def __init__(self, loop: LoopThread) -> None:
        self.answer: GroupsAnswer | bytes = b"{}"
        self.status = 200
        self.key = ""
        self.num_asked = 0
        self.url = ""
        self._loop = loop
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._holding = ExitStack()
        [self._port] = self._holding.enter_context(hold_free_ports("127.0.0.1", 1))
        self.url = f"http://127.0.0.1:{self._port}/"
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._holding.close()

    def start(self) -> None:
        """Listen on the loopback, the second time on the same port."""
        self._loop.call(self._start())

    def stop(self) -> None:
        """Refuse connections, and break off those that are open."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self._loop.call(runner.cleanup())

    async def _start(self) -> None:
        app = web.Application()
        add_routes(app)
        app.router.add_get("/afd/v1/groups", self._groups)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def _groups(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        if self.key and request.headers.get("Authorization", "") != f"Bearer {self.key}":
            detail = {"message": "the key is wrong", "type": "unauthorized", "code": 401}
            return web.json_response({"error": detail}, status=401)
        body = self.answer if isinstance(self.answer, bytes) else msgspec.json.encode(self.answer)
        return web.Response(body=body, status=self.status, content_type="application/json")
