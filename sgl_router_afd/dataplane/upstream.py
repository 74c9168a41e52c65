"""One connection to a server: parses its answers and hands them to the exchange they belong to."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from typing import TYPE_CHECKING, cast

import httptools

from sgl_router_afd.dataplane.answer import Answer

if TYPE_CHECKING:
    from sgl_router_afd.dataplane.exchange import Exchange
    from sgl_router_afd.dataplane.reading import ReadBuffer
    from sgl_router_afd.dataplane.server import Server

# Source: struct tcp_info of linux/tcp.h, tcpi_bytes_acked.
BYTES_ACKED_OFFSET, TCP_INFO_BYTES = 120, 128
MAX_HEAD_BYTES = 256 * 1024
WRITE_HIGH_BYTES = 64 * 1024  # above it the client is read no further
# A host that vanished is noticed after about 10 + 3 * 5 s; a generation itself has no time limit.
KEEPALIVE_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class UpstreamConnection(asyncio.BufferedProtocol):
    """Serves one exchange at a time, and waits among its server's idle connections in between."""

    def __init__(self, server: Server, reading: ReadBuffer) -> None:
        self._server = server
        self._reading = reading
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._answer = Answer()
        self._pieces: list[bytes] = []
        self._num_head_bytes = 0
        self._is_usable = True  # for another exchange
        self._num_written_bytes = 0
        self._num_earlier_bytes = 0  # of them, before the present exchange
        self.idle_since_s = 0.0
        self._poll: select.poll | None = None  # tells whether something was sent meanwhile

    def begin(self, exchange: Exchange) -> None:
        """Serve this exchange from now on."""
        self._exchange = exchange
        self._answer = Answer()
        self._num_head_bytes = 0
        self._num_earlier_bytes = self._num_written_bytes

    def write(self, data: bytes) -> None:
        self._num_written_bytes += len(data)
        self._transport.write(data)

    @property
    def is_quiet(self) -> bool:
        """Nothing has come that the event loop has not read yet, the end of it neither.

        What comes between two exchanges would be taken for the answer to the next one.
        """
        if self._poll is None:
            return True
        return not self._poll.poll(0)

    @property
    def was_closed_before(self) -> bool:
        """A connection just lost had been closed by its server before the present request.

        Then the server's kernel, which acknowledges what its process may read, took none of it.
        """
        if not self._num_earlier_bytes or self._num_head_bytes:
            return False
        opened = self._transport.get_extra_info("socket")
        if opened.family == socket.AF_UNIX or self._transport.get_extra_info("sslcontext"):
            return False
        info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        (num_acknowledged,) = struct.unpack_from("=Q", info, BYTES_ACKED_OFFSET)
        num_bytes: int = num_acknowledged - 1  # the handshake counts as one
        return num_bytes <= self._num_earlier_bytes

    def abort(self) -> None:
        """Close now; SGLang aborts what it generates for a connection that ends."""
        self._exchange = None
        self._transport.abort()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        opened = transport.get_extra_info("socket")
        if opened is None:
            return
        if not transport.get_extra_info("sslcontext"):  # TLS sends what is no answer
            self._poll = select.poll()
            self._poll.register(opened.fileno(), select.POLLIN)
        if opened.family != socket.AF_UNIX:
            for level, option, value in KEEPALIVE_OPTIONS:
                opened.setsockopt(level, option, value)

    def get_buffer(self, _size_hint: int) -> bytearray:
        return self._reading.memory

    def buffer_updated(self, num_bytes: int) -> None:
        if self._exchange is None:  # it sends what nobody asked for
            self._transport.abort()
            return
        try:
            self._parser.feed_data(self._reading.view[:num_bytes])
        except httptools.HttpParserUpgrade:
            self._answer.malformation = "an upgrade that nobody asked for"
        except httptools.HttpParserError as error:
            self._answer.malformation = self._answer.malformation or str(error)
        self._pass_on(num_bytes)

    def pause_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.on_server_full(True)

    def resume_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.on_server_full(False)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.forget(self)
        exchange, answer = self._exchange, self._answer
        if exchange is None:
            return
        self._exchange = None
        if error is None and answer.is_head_whole and answer.ends_with_connection:
            answer.is_end = True
            exchange.on_answer(answer, b"")
        else:
            exchange.on_server_lost(self, f"closed the connection ({describe(error)})")

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._answer.is_end:
            self._is_usable = False

    def on_status(self, reason: bytes) -> None:
        if not self._answer.is_end:
            self._answer.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._answer.is_head_whole:  # else it is a trailer
            self._answer.headers.append((name, value))

    def on_headers_complete(self) -> None:
        answer = self._answer
        if answer.is_end or self._exchange is None:
            return
        answer.status = self._parser.get_status_code()
        if answer.status < 200:
            return
        request = self._exchange.request
        answer.is_head_whole = True
        answer.read_headers(request.request_id)
        if request.method == b"HEAD":
            answer.is_end = True
            self._is_usable = False  # the parser waits for a body that never comes

    def on_body(self, piece: bytes) -> None:
        if not self._answer.is_end:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer.is_end:
            return
        if 100 <= answer.status < 200:
            self._answer = Answer()
            return
        answer.is_end = True
        answer.keeps_alive = self._parser.should_keep_alive()

    def _pass_on(self, num_bytes: int) -> None:
        exchange, answer, pieces = self._exchange, self._answer, self._pieces
        assert exchange is not None, "answers are read for an exchange only"
        if not answer.is_head_whole:
            self._num_head_bytes += num_bytes
            if self._num_head_bytes > MAX_HEAD_BYTES:
                answer.malformation = f"a header of more than {MAX_HEAD_BYTES} bytes"
        if answer.malformation and not answer.is_end:
            self.abort()
            exchange.on_server_lost(self, f"sent a malformed answer ({answer.malformation})")
            return
        if not answer.is_head_whole:
            return
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if answer.is_end:
            self._leave(exchange, answer)
        exchange.on_answer(answer, body)

    def _leave(self, exchange: Exchange, answer: Answer) -> None:
        """Be free for another exchange, or close where that could go wrong."""
        self._exchange = None
        if (
            self._is_usable
            and answer.keeps_alive
            and not answer.malformation
            and exchange.request.is_whole
        ):
            self._server.put_idle(self)
        else:
            self._transport.abort()


def describe(error: BaseException | None) -> str:
    """What became of a connection, in words for people."""
    match error:
        case None:
            return "end of file"
        case TimeoutError() if not error.args:
            return "timed out"
        case OSError(errno=number) if number is not None and number > 0:
            return os.strerror(number).lower()
    return str(error) or type(error).__name__
