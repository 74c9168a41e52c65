"""One request as the parser delivers it, and the head that a server gets."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """Why the router answers a request itself."""

    http_status: int
    message: str
    headers: tuple[tuple[str, str], ...] = ()


class Request:
    """Filled by `client.ClientConnection` and `checks.examine`; the body may still be arriving."""

    __slots__ = (
        "arrived_s",
        "content_length",
        "expects_continue",
        "headers",
        "is_chunked",
        "is_head_whole",
        "is_http_10",
        "is_whole",
        "keeps_alive",
        "lines",
        "method",
        "num_body_bytes",
        "num_chunks",
        "path",
        "pieces",
        "refusal",
        "request_id",
        "target",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""  # origin form: path and query
        self.path = b""
        self.headers: list[tuple[bytes, bytes]] = []  # as received
        self.lines: list[bytes] = []  # those that go on to a server, "Name: value\r\n" each
        self.request_id = b""
        self.is_http_10 = False
        self.keeps_alive = True
        self.content_length: int | None = None
        self.is_chunked = False
        self.expects_continue = False
        self.pieces: list[bytes] = []  # of the body: all of it, unless it is too large to keep
        self.num_body_bytes = 0  # received so far
        self.num_chunks = 0
        self.is_head_whole = False
        self.is_whole = False
        self.arrived_s = 0.0  # loop time at the end of the head
        self.refusal: Refusal | None = None

    @property
    def has_body(self) -> bool:
        """As its head says."""
        return self.is_chunked or bool(self.content_length)

    def head_for(self, host: bytes) -> bytes:
        """The head for a server whose `host:port` is `host`."""
        framing = b""
        if self.content_length is not None:
            framing = b"Content-Length: %d\r\n" % self.content_length
        elif self.is_chunked:
            framing = b"Transfer-Encoding: chunked\r\n"
        return b"%b %b HTTP/1.1\r\nHost: %b\r\n%b%b\r\n" % (
            self.method,
            self.target,
            host,
            b"".join(self.lines),
            framing,
        )

    def framed(self, body: bytes) -> bytes:
        """A piece of the body as it goes on the wire."""
        return b"%x\r\n%b\r\n" % (len(body), body) if self.is_chunked and body else body

    @property
    def end_of_body(self) -> bytes:
        return b"0\r\n\r\n" if self.is_chunked else b""
