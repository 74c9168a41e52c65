"""One request as the parser delivers it, and the head that a server gets."""

from __future__ import annotations

from typing import NamedTuple

from sgl_router_afd.dataplane.body import NOTHING, Said, Scanner, read


class Refusal(NamedTuple):
    """Why the router answers a request itself."""

    http_status: int
    message: str
    headers: tuple[tuple[str, str], ...] = ()
    code: str = ""  # OpenAI's word for it, where it has one
    param: str = ""  # with a code: which field was wrong


class Request:
    """Filled by `client.ClientConnection` and `checks.examine`; the body may still be arriving."""

    __slots__ = (
        "arrived_s",
        "authorization",
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
        "scanner",
        "target",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""  # origin form: path and query
        self.path = b""
        self.headers: list[tuple[bytes, bytes]] = []  # as received
        self.lines: list[bytes] = []  # those that go on to a server, "Name: value\r\n" each
        self.request_id = b""
        self.authorization = b""  # as the Authorization field says
        self.is_http_10 = False
        self.keeps_alive = True
        self.content_length: int | None = None
        self.is_chunked = False
        self.expects_continue = False
        self.pieces: list[bytes] = []  # of the body: all of it, unless it is too large to keep
        self.scanner: Scanner | None = None  # of a body that is too large to keep
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

    def said(self) -> Said:
        """What the body says, as far as it is here."""
        if self.scanner is not None:
            return self.scanner.said
        if not self.pieces:
            return NOTHING
        if len(self.pieces) > 1:
            self.pieces = [b"".join(self.pieces)]
        return read(self.pieces[0])

    def beginning(self, num_bytes: int) -> bytes:
        """So much of the body as is here."""
        pieces = self.pieces
        if len(pieces) == 1:
            return pieces[0][:num_bytes]
        return b"".join(pieces)[:num_bytes]

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
