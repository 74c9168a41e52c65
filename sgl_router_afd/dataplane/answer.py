"""One answer of a server: what its head says about passing it on (pure)."""

from __future__ import annotations

from sgl_router_afd.dataplane.headers import HOP_BY_HOP, REQUEST_ID, Names, line, without_named
from sgl_router_afd.dataplane.request import Request

UNDERSTOOD = {b"content-encoding", b"content-length", b"content-type", REQUEST_ID}
SPECIAL = Names(HOP_BY_HOP | UNDERSTOOD)  # all others go on as they are
NO_BODY = (204, 304)
SERVER_SENT_EVENTS = b"text/event-stream"


class Answer:
    """Filled by `upstream.UpstreamConnection`; the body passes through and is not kept here."""

    __slots__ = (
        "content_type",
        "has_length",
        "headers",
        "is_chunked",
        "is_encoded",
        "is_end",
        "is_head_whole",
        "keeps_alive",
        "lines",
        "malformation",
        "reason",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.lines: list[bytes] = []
        self.content_type = b""
        self.has_length = False
        self.is_chunked = False
        self.is_encoded = False
        self.keeps_alive = False
        self.is_head_whole = False
        self.is_end = False
        self.malformation = ""

    def read_headers(self, request_id: bytes) -> None:
        """Take from the header fields what matters here; `malformation` says what is wrong."""
        lines, found = self.lines, dict[bytes, bytes]()
        for name, value in self.headers:
            special = SPECIAL[name]
            if special:
                found[special] = found[special] + b"," + value if special in found else value
            if special not in HOP_BY_HOP:
                lines.append(line(name, value))
        if b"connection" in found:
            self.lines = without_named(lines, found[b"connection"])
        if REQUEST_ID not in found:
            self.lines.append(b"X-Request-Id: %b\r\n" % request_id)
        self.content_type = found.get(b"content-type", b"")
        self.has_length = b"content-length" in found
        self.is_encoded = b"content-encoding" in found
        coding = found.get(b"transfer-encoding")
        if coding is not None:
            self.is_chunked = coding.strip().lower() == b"chunked"
            if not self.is_chunked:
                self.malformation = "a transfer coding other than chunked"

    @property
    def ends_with_connection(self) -> bool:
        """Nothing in it says where it ends, so the end of the connection is its end."""
        return not (self.has_length or self.is_chunked or self.status in NO_BODY)

    @property
    def takes_an_event(self) -> bool:
        """A broken-off body may be followed by one more server-sent event."""
        return (
            self.content_type.startswith(SERVER_SENT_EVENTS)
            and not self.has_length
            and not self.is_encoded
        )

    def is_framed_for(self, request: Request) -> bool:
        """Whether the client gets the body in chunks; else it has a length or ends by closing."""
        return not (
            self.has_length
            or self.status in NO_BODY
            or request.is_http_10
            or request.method == b"HEAD"
        )

    def head_for(self, request: Request, *, is_framed: bool, keeps_alive: bool) -> bytes:
        """The head for the client that sent `request`."""
        framing = b"Transfer-Encoding: chunked\r\n" if is_framed else b""
        if not keeps_alive:
            framing += b"Connection: close\r\n"
        elif request.is_http_10:
            framing += b"Connection: keep-alive\r\n"
        return b"HTTP/1.1 %d %b\r\n%b%b\r\n" % (
            self.status,
            self.reason,
            b"".join(self.lines),
            framing,
        )
