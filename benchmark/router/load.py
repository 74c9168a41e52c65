"""A load generator for streams and for short requests: an ordinary client, on one event loop.

Every connection is kept and asks again as soon as it has its answer. No socket option is set that
an ordinary client would not set, TCP_QUICKACK least of all: delayed acknowledgements are what makes
a router without TCP_NODELAY slow.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

HOST = "127.0.0.1"
PROMPT_BYTES = 2048
EVENT = b"data: {"
DONE = b"data: [DONE]"
END_BYTES = 32  # of a stream, among which [DONE] is looked for
MAX_FAILURES = 10  # reported of one run
TIMEOUT_S = 30.0  # after the end of the window, for the answers that are still on their way


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every connection asks for."""

    path: str
    body: bytes
    num_tokens: int = 0  # events to expect before [DONE]; 0 where the answer is not a stream

    def head(self, port: int) -> bytes:
        """The bytes before the body."""
        return (
            f"POST {self.path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nUser-Agent: bench_router\r\n"
            "Accept: */*\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(self.body)}\r\n\r\n"
        ).encode()


def streamed(num_tokens: int, pace_us: int) -> Request:
    """A chat request whose answer is a stream of tokens; `pace_us` 0 sends all at once."""
    words = f"tokens={num_tokens} pace_us={pace_us} "
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": words.ljust(PROMPT_BYTES, "x")}],
        "max_tokens": num_tokens,
        "stream": True,
    }
    return Request(
        path="/v1/chat/completions",
        body=json.dumps(body, separators=(",", ":")).encode(),
        num_tokens=num_tokens,
    )


def short() -> Request:
    """A small request with a small answer."""
    body = {"text": "tell me", "sampling_params": {"max_new_tokens": 3}, "stream": False}
    return Request(path="/generate", body=json.dumps(body, separators=(",", ":")).encode())


@dataclass
class Result:
    """What one run of `load` saw; counts are those of the window alone."""

    window_s: float = 0.0
    num_chunks: int = 0  # events of streams, [DONE] not counted
    num_requests: int = 0  # answers that ended in the window
    first_s: list[float] = field(
        default_factory=list
    )  # from asking to the first event or, where it is no stream, to the end
    num_lost: int = 0  # events that streams lacked, in the window and after it
    failures: list[str] = field(default_factory=list)
    client_cpu_s: float = 0.0


async def load(
    port: int,
    request: Request,
    *,
    connections: int,
    ramp_s: float,
    window_s: float,
    on_window: Callable[[bool], None] = lambda _is_start: None,
) -> Result:
    """Keep `connections` requests running for `window_s`.

    Args:
        port: Of the router or server on this host.
        request: What to ask.
        connections: How many ask at the same time.
        ramp_s: The first requests start evenly spread over this time, before the window.
        window_s: How long to count.
        on_window: Called with True when the window begins and with False when it ends.
    """
    loop = asyncio.get_running_loop()
    result = Result()
    state = _State(result=result, head=request.head(port), request=request)
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(lambda: _Client(state), HOST, port)
        clients.append(client)
    for index, client in enumerate(clients):
        loop.call_later(ramp_s * index / connections, client.ask)
    await asyncio.sleep(ramp_s)
    on_window(True)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    state.is_counting = True
    await asyncio.sleep(window_s)
    state.is_counting, state.is_over = False, True
    result.client_cpu_s = time.process_time() - cpu_s
    result.window_s = time.perf_counter() - started_s
    on_window(False)
    await _finish(clients, result)
    return result


async def _finish(clients: list[_Client], result: Result) -> None:
    deadline_s = time.perf_counter() + TIMEOUT_S
    while (busy := [client for client in clients if client.is_busy]) and (
        time.perf_counter() < deadline_s
    ):
        await asyncio.sleep(0.005)
    if busy:
        result.failures.append(f"{len(busy)} answers had not ended {TIMEOUT_S:g} s after the load")
    for client in clients:
        client.close()


@dataclass
class _State:
    """What the connections share."""

    result: Result
    head: bytes
    request: Request
    is_counting: bool = False
    is_over: bool = False


class _Client(asyncio.Protocol):
    def __init__(self, state: _State) -> None:
        self._state = state
        self._data = state.head + state.request.body
        self._parser = httptools.HttpResponseParser(self)
        self.is_busy = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def ask(self) -> None:
        if self._state.is_over:
            return
        self.is_busy = True
        self._is_measured = self._state.is_counting
        self._num_events = 0
        self._end = b""
        self._started_s = time.perf_counter()
        self._transport.write(self._data)

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, _error: Exception | None) -> None:
        if self.is_busy:
            self._fail("the connection was closed inside an answer")
            self._state.result.num_lost += self._state.request.num_tokens - self._num_events
        self.is_busy = False

    def on_body(self, body: bytes) -> None:
        if not self._state.request.num_tokens:
            return
        num_events = (self._end[1 - len(EVENT) :] + body).count(EVENT)
        self._end = (self._end + body)[-END_BYTES:]
        if not num_events:
            return
        if not self._num_events:
            self._record_first()
        self._num_events += num_events
        if self._state.is_counting:
            self._state.result.num_chunks += num_events

    def on_message_complete(self) -> None:
        state, result = self._state, self._state.result
        if (status := self._parser.get_status_code()) != 200:
            self._fail(f"{state.request.path} answered {status}")
        if state.request.num_tokens:
            result.num_lost += state.request.num_tokens - self._num_events
            if DONE not in self._end:
                self._fail("a stream ended without [DONE]")
        else:
            self._record_first()
        result.num_requests += state.is_counting
        self.is_busy = False
        self.ask()

    def _record_first(self) -> None:
        if self._is_measured:
            self._state.result.first_s.append(time.perf_counter() - self._started_s)

    def _fail(self, what: str) -> None:
        if len(self._state.result.failures) < MAX_FAILURES:
            self._state.result.failures.append(what)
