"""An attention server for relay tests: hears bytes as they are, and answers bytes as they are.

What it answers is chosen by the request's target: `?answer=NAME` runs the script of that name. It
lives in a thread of the test process, where a test can look at what it heard.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from fake_registration import ONE_TOKEN, REGISTRATION_PATH, FakeRegistration, is_pair_probe
from raw_http import Malformed, Message, NeedMore, chunk, read_request

from sglang_afd.ports import hold_free_ports

ANSWER = re.compile(rb"[?&]answer=([\w.-]+)")
DEAF = b"case=deaf"  # in a target: the body is read once the gate is open
CASE = re.compile(rb"[?&]case=([\w.-]+)")
DEADLINE_S = 50.0  # of what happens sooner or later; the router's own limits are others
SEND_BUFFER_BYTES = 64 * 1024  # small, so that a slow reader is felt here
LOOK_AGAIN_S = 0.02  # whether the client is there still

Script = Callable[["Talk"], Awaitable[None]]


@dataclass
class Talk:
    """One request that is being answered."""

    server: RawServer
    request: Message
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Write, and wait while the other side reads too slowly."""
        self.writer.write(data)
        self.server.num_sent_bytes += len(data)
        await self.writer.drain()

    def reset(self) -> None:
        """End the connection with a reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        """End the connection in order."""
        self.writer.close()


def whole(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """A response with a length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
DONE = chunk(b"data: [DONE]\n\n") + chunk(b"")


def event(text: str) -> bytes:
    """A server-sent event as a chunk."""
    return chunk(f"data: {text}\n\n".encode())


async def answer_ok(talk: Talk) -> None:
    await talk.send(whole(b'{"answer_of": %d}' % talk.server.port))


@dataclass
class RawServer:
    """Its fields may be changed while it runs."""

    scripts: dict[bytes, Script] = field(default_factory=dict)
    status: dict[str, Any] = field(
        default_factory=lambda: {"role": "attn", "state": "ready", "reason": ""}
    )
    host: str = "127.0.0.1"
    port: int = field(default=0, init=False)
    seen: list[Message] = field(default_factory=list)  # whole requests, polls and probes left out
    malformed: list[tuple[str, bytes]] = field(default_factory=list)  # why, and the bytes
    left: list[bytes] = field(default_factory=list)  # targets whose client left before the end
    num_sent_bytes: int = 0  # answers to polls left out

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def of_case(self, name: str) -> list[Message]:
        """The requests with `?case=name`."""
        return [
            request
            for request in self.seen
            if (found := CASE.search(request.target)) and found[1] == name.encode()
        ]

    def __enter__(self) -> Self:
        self._holding = ExitStack()
        [self.port] = self._holding.enter_context(hold_free_ports(self.host, 1))
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        self._thread.start()
        assert started.wait(DEADLINE_S), "the fake server never started"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._holding.close()

    def stop(self) -> None:
        """Close every connection, and refuse others; the port is held to the end of the block."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def open_gate(self) -> None:
        """Let scripts that wait at the gate go on."""
        self._loop.call_soon_threadsafe(self.gate.set)

    def close_gate(self) -> None:
        """Let scripts wait at the gate, from the next one on."""
        self._loop.call_soon_threadsafe(self.gate.clear)

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped, self.gate = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._registration = FakeRegistration()
        server = await asyncio.start_server(self._connect, self.host, self.port, backlog=1024)
        (listener,) = server.sockets
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        started.set()
        await self._stopped.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait_for(self._ended(), DEADLINE_S)

    async def _ended(self) -> None:
        while self._tasks:
            await asyncio.sleep(0.005)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "start_server runs this in a task"
        self._tasks.add(task)
        try:
            await self._talk(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # start_server reports a cancelled task as an error
        finally:
            if self._stopped.is_set():
                writer.transport.abort()
            writer.close()
            self._tasks.discard(task)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        while True:
            try:
                request, data = read_request(data)
            except NeedMore as missing:
                if DEAF in data[:200]:
                    await self.gate.wait()
                more = await _read(reader, missing.num_bytes)
                if not more:
                    return
                data += more
                continue
            except Malformed as error:
                self.malformed.append((str(error), data))
                return
            await self._answer(Talk(self, request, writer), reader)
            if writer.is_closing():
                return

    async def _answer(self, talk: Talk, reader: asyncio.StreamReader) -> None:
        if talk.request.target == REGISTRATION_PATH.encode():
            talk.writer.write(whole(self._registration.body(self.port, self.status)))
            return
        if any(is_pair_probe(value.decode()) for value in talk.request.values("x-request-id")):
            talk.writer.write(whole(ONE_TOKEN))
            return
        self.seen.append(talk.request)
        name = ANSWER.search(talk.request.target)
        script = self.scripts[name[1]] if name else answer_ok
        answering = asyncio.ensure_future(script(talk))
        leaving = asyncio.ensure_future(self._wait_for_end(reader, talk.writer))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.left.append(talk.request.target)
                talk.close()
        finally:
            answering.cancel()
            leaving.cancel()
            results = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(results[0], ConnectionError):
            self.left.append(talk.request.target)

    @staticmethod
    async def _wait_for_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof() and reader.exception() is None and not writer.is_closing():
            await asyncio.sleep(LOOK_AGAIN_S)


async def _read(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    """At least so many bytes, or none where fewer come."""
    if num_bytes == 1:
        return await reader.read(1 << 18)
    try:
        return await reader.readexactly(num_bytes)
    except asyncio.IncompleteReadError:
        return b""


def wait_until(what: str, claim: Callable[[], bool]) -> None:
    """Return once the claim holds; fail the test when it never does."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not claim():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.005)
