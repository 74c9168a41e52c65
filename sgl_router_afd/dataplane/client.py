"""One connection of a client: parses its requests and serves them one after the other."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

import httptools

from sgl_router_afd.dataplane import checks, counters
from sgl_router_afd.dataplane.body import Scanner
from sgl_router_afd.dataplane.exchange import Exchange
from sgl_router_afd.dataplane.headers import line
from sgl_router_afd.dataplane.judge import contradiction
from sgl_router_afd.dataplane.request import Refusal, Request
from sgl_router_afd.endpoints import Target, find
from sgl_router_afd.replies import error_reply

if TYPE_CHECKING:
    from sgl_router_afd.dataplane.relay import Relay

WRITE_HIGH_BYTES = 64 * 1024  # above it the server is read no further
# Where a request has to name its model, so many times what is kept is read in search of the name.
SEARCH_FACTOR = 16
CHUNK_FRAME_BYTES = 24  # around a piece of a chunked body, without extensions
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# A client that still sends gets that long to read why nothing more is read.
LINGER_S = 2.0
FLUSH_S = 30.0


class Wait(Enum):
    """What a connection with a deadline waits for."""

    REQUEST = auto()
    HEAD = auto()
    BODY = auto()
    CLOSE = auto()


class ClientConnection(asyncio.BufferedProtocol):
    """Requests are answered in the order in which they came, one at a time."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[Request] = deque()  # the first is being served
        self._incoming = Request()  # the last of them, which the parser fills
        self._exchange: Exchange | None = None
        self._num_read_bytes = 0  # of the request that the parser fills, at most
        self._num_now_bytes = 0  # in the present read
        self._is_input_over = False  # what still comes is thrown away
        self._is_starting = False
        self._is_body_next = False  # a new parser is told of a head that is known already
        self._is_reading = True
        self._is_full = False  # the client reads slowly
        self._waits_for = Wait.REQUEST
        self.deadline_s: float | None = None  # loop time
        self.is_server_full = False

    @property
    def is_idle(self) -> bool:
        """No request is with a server, nor waits for one."""
        return self._exchange is None

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def answer(self, request: Request, refusal: Refusal, *, keeps_alive: bool) -> None:
        """Send the router's own answer."""
        self._relay.counters.add(counters.STATUS + refusal.http_status)
        headers = refusal.headers
        if request.request_id:
            headers = (*headers, ("X-Request-Id", request.request_id.decode("latin-1")))
        reply = error_reply(
            refusal.http_status,
            refusal.message,
            code=refusal.code,
            param=refusal.param,
            headers=headers,
            keeps_alive=keeps_alive,
            has_body=request.method != b"HEAD",
        )
        self._transport.write(reply)

    def on_answered(self, *, keeps_open: bool) -> None:
        """The exchange is over; go on to the next request, or end the connection."""
        self._exchange = None
        request = self._requests.popleft()
        if not keeps_open or self._relay.is_draining:
            self._hang_up(is_client_sending=not request.is_whole)
        elif self._requests:
            self._serve()
        else:
            self._wait(Wait.REQUEST, self._relay.config.keep_alive_timeout_s)

    def break_off(self, last_words: bytes) -> None:
        """End the connection in the middle of an answer, without the end of a chunked body."""
        self._exchange = None
        self._is_input_over = True
        if last_words:
            self._transport.write(last_words)
            self._transport.close()
            self._wait(Wait.CLOSE, FLUSH_S)
        else:
            self._transport.close()
            self._wait(Wait.CLOSE, FLUSH_S)

    def on_drain(self) -> None:
        """End the connection now if no server works for it, else after what runs.

        A request whose body is still on its way is not waited for.
        """
        self._is_input_over = True
        exchange = self._exchange
        if exchange is None:
            self._transport.close()
        elif not exchange.request.is_whole:
            self._transport.abort()

    def cut(self) -> None:
        """End the connection, whatever it does."""
        self._transport.abort()

    def steer_reading(self) -> None:
        """Read only what can be passed on or may be kept."""
        exchange, front = self._exchange, self._requests[0] if self._requests else None
        is_body_stuck = (
            exchange is not None
            and front is not None
            and not front.is_whole
            and (self.is_server_full or not exchange.is_sending)
        )
        wants = not is_body_stuck and len(self._requests) <= 1
        if wants != self._is_reading and not self._transport.is_closing():
            self._is_reading = wants
            if wants:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def on_deadline(self) -> None:
        """What this connection waits for did not come in time."""
        self.deadline_s = None
        match self._waits_for:
            case Wait.REQUEST:
                self._transport.close()
            case Wait.CLOSE:
                self._transport.abort()
            case Wait.HEAD:
                seconds = self._relay.config.header_timeout_s
                self._refuse_late(f"the request's header took more than {seconds:g} s")
            case Wait.BODY:
                seconds = self._relay.config.body_timeout_s
                self._refuse_late(f"no byte of the request's body came for {seconds:g} s")

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._relay.clients.add(self)
        self._relay.counters.add(counters.CONNECTIONS)
        self._wait(Wait.REQUEST, self._relay.config.keep_alive_timeout_s)

    def get_buffer(self, _size_hint: int) -> bytearray:
        return self._relay.reading.memory

    def buffer_updated(self, num_bytes: int) -> None:
        if self._is_input_over:
            return
        self._num_now_bytes = num_bytes
        self._num_read_bytes += num_bytes
        self._feed(self._relay.reading.view[:num_bytes])
        limits = self._relay.limits
        if self._num_read_bytes > limits.max_header_bytes and self._has_too_much_around(limits):
            self._refuse_input(checks.too_long_a_head(limits))
        self._serve()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_full = True
        if self._exchange is not None:
            self._exchange.on_client_full(True)

    def resume_writing(self) -> None:
        self._is_full = False
        if self._exchange is not None:
            self._exchange.on_client_full(False)
        else:
            self._serve()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_input_over = True
        self.deadline_s = None
        self._relay.counters.add(counters.CONNECTIONS, -1)
        self._relay.clients.discard(self)
        if self._exchange is not None:
            self._exchange.on_client_lost()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._is_body_next:
            return
        self._incoming = Request()
        self._num_read_bytes = 0 if self._requests else self._num_now_bytes
        self._requests.append(self._incoming)
        self._relay.counters.add(counters.REQUESTS)
        if len(self._requests) == 1:
            self._wait(Wait.HEAD, self._relay.config.header_timeout_s)

    def on_url(self, piece: bytes) -> None:
        if not self._is_body_next:
            self._incoming.target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._incoming.is_head_whole:  # else it is a trailer
            self._incoming.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_body_next:
            return
        request, parser, relay = self._incoming, self._parser, self._relay
        request.method = parser.get_method()
        request.keeps_alive = parser.should_keep_alive()
        request.refusal = checks.examine(request, parser.get_http_version(), relay.limits)
        limit = relay.limits.max_header_bytes
        if self._num_read_bytes > limit and _size_of_head(request) > limit:
            request.refusal = checks.too_long_a_head(relay.limits)
        if request.refusal is not None:
            raise StopParsing
        if not request.request_id:
            request.request_id = relay.new_request_id()
            request.lines.append(line(b"X-Request-Id", request.request_id))
        request.arrived_s = relay.loop.time()
        request.is_head_whole = True

    def on_body(self, piece: bytes) -> None:
        request = self._incoming
        request.num_body_bytes += len(piece)
        if request.num_body_bytes > self._relay.limits.max_body_bytes:
            request.refusal = checks.too_large(self._relay.limits)
            raise StopParsing
        self._relay.counters.add(counters.REQUEST_BYTES, len(piece))
        exchange = self._exchange
        if exchange is not None and exchange.request is not request:
            exchange = None
        if request.scanner is not None and not request.scanner.is_over:
            request.refusal = self._scan(request.scanner, piece, exchange)
            if request.refusal is not None:
                raise StopParsing
        if exchange is not None and exchange.is_sending:
            exchange.send_body(piece)
        else:
            request.pieces.append(piece)

    def on_chunk_header(self) -> None:
        self._incoming.num_chunks += 1

    def on_message_complete(self) -> None:
        request = self._incoming
        if self._parser.should_upgrade() and request.has_body:
            return  # the parser is wrong: see _read_on
        request.is_whole = True
        exchange = self._exchange
        if exchange is not None and exchange.is_sending and exchange.request is request:
            exchange.end_body()

    def _has_too_much_around(self, limits: checks.Limits) -> bool:
        """Whether what is read is too long a head, or too much beside the chunks of a body."""
        request = self._incoming
        if request.is_head_whole and not request.is_chunked:
            return False
        known = _size_of_head(request) if request.is_head_whole else 0
        known += request.num_body_bytes + CHUNK_FRAME_BYTES * request.num_chunks
        return self._num_read_bytes - known > limits.max_header_bytes

    def _feed(self, data: memoryview) -> None:
        try:
            while data:
                data = self._read_on(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, StopParsing):
                raise
            self._refuse_input(None)
        except httptools.HttpParserError as error:
            message = f"the request is no HTTP/1.1 that this router takes: {error}"
            self._refuse_input(Refusal(400, message))

    def _read_on(self, data: memoryview) -> memoryview:
        """Parse up to the end, or up to where a request wants to upgrade; the rest is returned.

        As RFC 9110 section 7.8 allows, such a request is served as if it had not asked. The parser
        takes what follows its head for another protocol, so a new one is told of the body.
        """
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as declined:
            self._parser = httptools.HttpRequestParser(self)
            if not self._incoming.is_whole:
                self._is_body_next = True
                self._parser.feed_data(self._incoming.head_for(b""))
                self._is_body_next = False
            return data[declined.args[0] :]
        return data[:0]

    def _refuse_input(self, refusal: Refusal | None) -> None:
        """Nothing that comes behind can be understood; requests before it are still served."""
        self._is_input_over = True
        if not self._incoming.refusal:
            if not self._requests or (self._incoming.is_whole):
                self._incoming = Request()
                self._requests.append(self._incoming)
            self._incoming.refusal = refusal

    def _serve(self) -> None:
        """Start on requests until one takes its time."""
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._can_serve() and self._serve_first():
                pass
        finally:
            self._is_starting = False
        self._check_running()
        self.steer_reading()

    def _can_serve(self) -> bool:
        return self._exchange is None and bool(self._requests) and not self._is_full

    def _serve_first(self) -> bool:
        request = self._requests[0]
        if request.refusal is not None:
            self.answer(request, request.refusal, keeps_alive=False)
            self._requests.clear()
            self._hang_up(is_client_sending=True)
            return False
        if not request.is_head_whole:
            return False
        if not request.is_whole and self._must_read_on(request):
            if request.expects_continue and not request.num_body_bytes:
                request.expects_continue = False
                self._transport.write(CONTINUE)
            self._wait(Wait.BODY, self._relay.config.body_timeout_s)
            return False
        self.deadline_s = None
        self._exchange = Exchange(self._relay, self, request)
        self._exchange.start()
        return True

    def _must_read_on(self, request: Request) -> bool:
        """Whether more of its body has to be here before a server can get it."""
        relay = self._relay
        if request.num_body_bytes <= relay.max_kept_body_bytes:
            return True
        if request.scanner is None:
            request.scanner = Scanner()
            for piece in request.pieces:
                request.scanner.feed(piece)
        endpoint = find(request.path)
        return (
            relay.servers.needs_names
            and endpoint is not None
            and endpoint.target is Target.SERVER
            and request.scanner.said.name is None
            and not request.scanner.is_over
            and request.num_body_bytes <= SEARCH_FACTOR * relay.max_kept_body_bytes
        )

    @staticmethod
    def _scan(scanner: Scanner, piece: bytes, exchange: Exchange | None) -> Refusal | None:
        scanner.feed(piece)
        if scanner.contradiction:
            return contradiction(scanner.contradiction)
        return None if exchange is None else exchange.hear(scanner.said)

    def _check_running(self) -> None:
        """A request that a server has in part may turn out bad, or stop coming."""
        exchange = self._exchange
        if exchange is None or exchange.request.is_whole:
            return
        if exchange.request.refusal is not None:
            exchange.request.is_whole = False
            exchange.refuse_running(exchange.request.refusal)
        elif exchange.is_sending:
            self._wait(Wait.BODY, self._relay.config.body_timeout_s)

    def _refuse_late(self, message: str) -> None:
        refusal = Refusal(408, f"{message}; send it faster")
        if self._exchange is not None:
            self._is_input_over = True
            self._exchange.refuse_running(refusal)
        else:
            self._refuse_input(refusal)
            self._serve()

    def _hang_up(self, *, is_client_sending: bool) -> None:
        self._is_input_over = True
        if not is_client_sending or not self._transport.can_write_eof():
            self._transport.close()
            self._wait(Wait.CLOSE, FLUSH_S)
            return
        # Closing with unread input would reset the connection and lose the answer on its way.
        self._transport.write_eof()
        self._wait(Wait.CLOSE, LINGER_S)
        if not self._is_reading:
            self._is_reading = True
            self._transport.resume_reading()

    def _wait(self, what: Wait, seconds: float) -> None:
        self._waits_for = what
        self.deadline_s = self._relay.loop.time() + seconds


class StopParsing(Exception):
    """The request that is being parsed has a refusal."""


def _size_of_head(request: Request) -> int:
    fields = sum(len(name) + len(value) + 4 for name, value in request.headers)
    return len(request.method) + len(request.target) + 12 + fields
