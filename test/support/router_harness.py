"""A router process and the attention servers it relays to, as router tests need them.

The servers are real HTTP servers that register as real ones do; only their generation is scripted.
They live in a thread of the test process, where a test can hold and inspect them.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from fake_registration import ONE_TOKEN, REGISTRATION_PATH, FakeRegistration, is_pair_probe

from sglang_afd.ports import hold_free_ports

DEADLINE_S = 50.0  # of what happens sooner or later; the router's own limits are others
# Of a process that asks for a name that nobody has: name servers may be far away, or none.
NO_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}
Answer = Callable[["FakeAttn", web.Request], Awaitable[web.StreamResponse]]


def wait_until(what: str, claim: Callable[[], bool]) -> None:
    """Return once the claim holds; fail the test when it never does."""
    deadline = time.monotonic() + DEADLINE_S
    while not claim():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


async def answer_ok(fake: FakeAttn, _request: web.Request) -> web.StreamResponse:
    return web.Response(text=f"answer of {fake.port}")


@dataclass
class Received:
    """One request as it reached the server."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class FakeAttn:
    """One scripted attention server; its fields may be changed while it runs."""

    answer: Answer = answer_ok
    status: dict[str, Any] = field(
        default_factory=lambda: {"role": "attn", "state": "ready", "reason": ""}
    )
    status_code: int = 200
    port: int = 0
    models: tuple[str, ...] = ("m",)
    fingerprint: str = "ab"
    probe_answer: tuple[int, bytes] = (200, ONE_TOKEN)
    received: list[Received] = field(default_factory=list)  # polls and probes left out
    probes: list[Received] = field(default_factory=list)
    num_polls: int = 0
    num_cancelled: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.restart()
        self.gate = asyncio.Event()
        self._stop = asyncio.Event()
        self._holding = ExitStack()
        if not self.port:  # else that of one that was stopped, which holds it
            [self.port] = self._holding.enter_context(hold_free_ports("127.0.0.1", 1))
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        self._thread.start()
        assert started.wait(DEADLINE_S), "the fake server never started"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._holding.close()

    def stop(self) -> None:
        """Close every connection, and refuse others; the port is held to the end of the block."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def open_gate(self) -> None:
        """Let answers that wait for `gate` go on."""
        self._loop.call_soon_threadsafe(self.gate.set)

    def restart(self) -> None:
        """Be another process from now on, as far as the router can know."""
        self._registration = FakeRegistration(self.models, self.fingerprint)

    def registration(self) -> bytes:
        """What it would register with."""
        return self._registration.body(self.port, self.status)

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=2**30)
        app.router.add_get(REGISTRATION_PATH, self._answer_poll)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(
            app, auto_decompress=False, handler_cancellation=True, shutdown_timeout=0.01
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer_poll(self, _request: web.Request) -> web.Response:
        self.num_polls += 1
        return web.Response(body=self.registration(), status=self.status_code)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        received = Received(
            method=request.method,
            target=request.raw_path,
            headers=[(k.decode(), v.decode()) for k, v in request.raw_headers],
            body=await request.read(),
        )
        if is_pair_probe(request.headers.get("X-Request-Id", "")):
            self.probes.append(received)
            status, body = self.probe_answer
            return web.Response(status=status, body=body)
        self.received.append(received)
        try:
            return await self.answer(self, request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


@dataclass
class Reply:
    """One whole response of the router."""

    status: int
    reason: str
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class RouterProcess:
    """`python -m sgl_router_afd.launch_router` on a free port, ended with the block.

    Args:
        urls: The servers for --attn.
        flags: More flags.
        data_plane: What relays requests.
    """

    def __init__(self, *urls: str, flags: tuple[str, ...] = (), data_plane: str = "relay") -> None:
        command = [sys.executable, "-m", "sgl_router_afd.launch_router"]
        command += ["--attn", *urls] if urls else []
        command += ["--data-plane", data_plane] if data_plane != "relay" else []
        command += ["--port", "0", "--status-interval-s", "0.02", *flags]
        self.data_plane = data_plane
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []

    def __enter__(self) -> Self:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"listening on http://\[?(127\.0\.0\.1|::1)\]?:(\d+)", line):
                self.host, self.port = found[1], int(found[2])
                own = re.search(r"people look at http://\S+:(\d+)", line)
                self.own_port = int(own[1]) if own else self.port
                break
        else:
            raise AssertionError("the router never listened:\n" + "".join(self.log))
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()))
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def own_url(self) -> str:
        """Of the router's own endpoints."""
        return self.url.removesuffix(str(self.port)) + str(self.own_port)

    def connect(self, port: int = 0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, port or self.port, timeout=DEADLINE_S)

    def ask_itself(self, method: str, target: str, body: bytes | None = None) -> Reply:
        """Send one request to the router's own endpoints."""
        return self.ask(method, target, body, port=self.own_port)

    def ask(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        port: int = 0,
    ) -> Reply:
        """Send one request and read its whole response."""
        connection = self.connect(port)
        try:
            connection.request(method, target, body, headers or {})
            got = connection.getresponse()
            return Reply(got.status, got.reason, got.headers, got.read())
        finally:
            connection.close()

    def generate(self) -> Reply:
        return self.ask("POST", "/generate", b"{}")

    def servers(self) -> dict[str, dict[str, Any]]:
        """The servers of `/afd/v1/status` by their URL."""
        status = json.loads(self.ask_itself("GET", "/afd/v1/status").body)
        return {server["url"]: server for server in status["servers"]}

    def wait_for_state(self, fake: FakeAttn, state: str, reason: str = "") -> dict[str, Any]:
        """Return the router's row for the server once it is in the state, with such a reason."""

        def is_so() -> bool:
            row = self.servers()[fake.url]
            return row["state"] == state and reason in row["reason"]

        wait_until(f"{fake.url} is {state}", is_so)
        return self.servers()[fake.url]

    def stop(self) -> int:
        """End the router with SIGTERM; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)
