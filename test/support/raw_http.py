"""HTTP/1.1 as bytes: what a client reads and what a server hears, and nothing is put right.

The reader of requests is strict on purpose: it judges whether a router passed on something that
another server could read in another way.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
from dataclasses import dataclass, field

TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
REQUEST_LINE = re.compile(rb"(" + TOKEN + rb") ([\x21-\x7e\x80-\xff]+) (HTTP/1\.[01])")
STATUS_LINE = re.compile(rb"(HTTP/1\.[01]) (\d{3})(?: ([^\r\n\0]*))?")
FIELD = re.compile(rb"(" + TOKEN + rb"):[ \t]*([^\r\n\0]*?)[ \t]*")
DECIMAL = re.compile(rb"[0-9]{1,15}")
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[^\r\n\0]*)?")
NO_BODY = (204, 304)

Fields = list[tuple[bytes, bytes]]


class Malformed(Exception):
    """These bytes are not one message that every reader reads alike."""


class NeedMore(Exception):
    """The message goes on after these bytes, with at least so many."""

    def __init__(self, num_bytes: int = 1) -> None:
        super().__init__()
        self.num_bytes = num_bytes


@dataclass
class Message:
    """One request or response, its body without its framing."""

    start: tuple[bytes, ...]  # method, target, version; or version, status, reason
    fields: Fields
    body: bytes = b""
    trailers: Fields = field(default_factory=list)
    is_whole: bool = True  # False where the connection ended first
    num_informational: int = 0  # 1xx answers before this one

    @property
    def status(self) -> int:
        return int(self.start[1])

    @property
    def target(self) -> bytes:
        return self.start[1]

    def values(self, name: str) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name.encode()]


def read_request(data: bytes) -> tuple[Message, bytes]:
    """One request and the bytes after it.

    Raises: Malformed; NeedMore.
    """
    start, fields, rest = _read_head(data, REQUEST_LINE)
    message = Message(start, fields)
    lengths = message.values("content-length")
    codings = message.values("transfer-encoding")
    if len(message.values("host")) != 1 and start[2] == b"HTTP/1.1":
        raise Malformed("not exactly one Host")
    if len(lengths) + len(codings) > 1:
        raise Malformed("more than one way to tell where the body ends")
    if codings:
        if codings[0].lower() != b"chunked" or start[2] != b"HTTP/1.1":
            raise Malformed(f"transfer coding {codings[0]!r} under {start[2]!r}")
        message.body, message.trailers, rest = _read_chunks(rest)
    elif lengths:
        message.body, rest = _read_sized(rest, lengths[0])
    return message, rest


def read_reply(data: bytes, *, has_ended: bool, is_head: bool = False) -> tuple[Message, bytes]:
    """One final response and the bytes after it.

    Args:
        data: What the connection has carried.
        has_ended: Whether it was closed after them; a response cut so is not whole.
        is_head: Whether the request was HEAD.

    Raises: Malformed; NeedMore.
    """
    num_informational = 0
    while True:
        start, fields, rest = _read_head(data, STATUS_LINE)
        message = Message(start, fields, num_informational=num_informational)
        if message.status // 100 != 1:
            break
        num_informational, data = num_informational + 1, rest
    if is_head or message.status in NO_BODY:
        return message, rest
    lengths, codings = message.values("content-length"), message.values("transfer-encoding")
    if len(lengths) + len(codings) > 1:
        raise Malformed("more than one way to tell where the body ends")
    if not lengths and not codings:
        if not has_ended:
            raise NeedMore
        message.body = rest
        return message, b""
    try:
        if codings:
            message.body, message.trailers, rest = _read_chunks(rest)
        else:
            message.body, rest = _read_sized(rest, lengths[0])
    except NeedMore:
        if not has_ended:
            raise
        message.is_whole = False
        message.body = _chunks_so_far(rest) if codings else rest
        rest = b""
    return message, rest


def _read_head(data: bytes, wanted: re.Pattern[bytes]) -> tuple[tuple[bytes, ...], Fields, bytes]:
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        raise NeedMore
    first, *lines = head.split(b"\r\n")
    start = wanted.fullmatch(first)
    if start is None:
        raise Malformed(f"first line {first[:200]!r}")
    return (
        tuple(part or b"" for part in start.groups()),
        [_read_field(line) for line in lines],
        rest,
    )


def _read_field(line: bytes) -> tuple[bytes, bytes]:
    found = FIELD.fullmatch(line)
    if found is None:
        raise Malformed(f"header line {line[:200]!r}")
    return found[1], found[2]


def _read_sized(data: bytes, length: bytes) -> tuple[bytes, bytes]:
    if DECIMAL.fullmatch(length) is None:
        raise Malformed(f"Content-Length {length[:200]!r}")
    size = int(length)
    if len(data) < size:
        raise NeedMore(size - len(data))
    return data[:size], data[size:]


def _read_chunks(data: bytes) -> tuple[bytes, Fields, bytes]:
    parts: list[bytes] = []
    at = 0
    while True:
        size, at = _read_chunk_size(data, at)
        if size == 0:
            break
        if len(data) < at + size + 2:
            raise NeedMore
        if data[at + size : at + size + 2] != b"\r\n":
            raise Malformed("a chunk without its line end")
        parts.append(data[at : at + size])
        at += size + 2
    trailers: Fields = []
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            raise NeedMore
        line, at = data[at:end], end + 2
        if not line:
            return b"".join(parts), trailers, data[at:]
        trailers.append(_read_field(line))


def _read_chunk_size(data: bytes, at: int) -> tuple[int, int]:
    end = data.find(b"\r\n", at)
    if end < 0:
        raise NeedMore
    found = CHUNK_SIZE.fullmatch(data[at:end])
    if found is None:
        raise Malformed(f"chunk size {data[at:end][:200]!r}")
    return int(found[1], 16), end + 2


def _chunks_so_far(data: bytes) -> bytes:
    """The whole chunks at the start of a body that was cut."""
    parts: list[bytes] = []
    at = 0
    try:
        while True:
            size, at = _read_chunk_size(data, at)
            parts.append(data[at : at + size])
            at += size + 2
    except (NeedMore, Malformed):
        return b"".join(parts)


class Client:
    """One connection that sends bytes as they are.

    Args:
        address: Host and port.
        timeout_s: Of every wait; a wait that outlasts it raises TimeoutError.
        is_slow_reader: Let the kernel keep as little as it can while nothing is read.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        timeout_s: float = 50.0,
        is_slow_reader: bool = False,
    ) -> None:
        is_v6 = ":" in address[0]
        self.socket = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
        self.socket.settimeout(timeout_s)
        if is_slow_reader:
            self._set_receive_buffer(4096)
            # Small segments, as on a real network: the sender's buffer grows with their size.
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
        try:
            self.socket.connect(address)
        except OSError:
            self.socket.close()
            raise
        self.data = b""
        self.has_ended = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send all, or as much as the other side takes before it closes."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)  # where it closes, its answer says why

    def read_fast(self) -> None:
        """Let the kernel keep much unread from now on."""
        self._set_receive_buffer(1 << 20)

    def _set_receive_buffer(self, num_bytes: int) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)

    def end(self) -> None:
        """Send nothing more."""
        with contextlib.suppress(OSError):  # closed by the other side already
            self.socket.shutdown(socket.SHUT_WR)

    def more(self) -> bytes:
        """Wait for bytes; none come after the other side closed or reset the connection."""
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        self.has_ended = self.has_ended or not data
        self.data += data
        return data

    def has_more(self) -> bool:
        """Whether bytes are there, or the end of the connection."""
        readable, _, _ = select.select([self.socket], [], [], 0)
        return bool(readable)

    def reply(self, *, is_head: bool = False) -> Message:
        """The next whole final response, or what came of it before the connection ended."""
        while True:
            try:
                message, self.data = read_reply(
                    self.data, has_ended=self.has_ended, is_head=is_head
                )
            except NeedMore:
                if self.has_ended:
                    raise ConnectionError(f"no response, only {self.data[:200]!r}") from None
                self.more()
            else:
                return message

    def until_closed(self) -> bytes:
        """Everything up to the end of the connection."""
        while not self.has_ended:
            self.more()
        return self.data


def ask(address: tuple[str, int], request: bytes, *, is_head: bool = False) -> Message:
    """Send one request on a connection of its own and read its response."""
    with Client(address) as client:
        client.send(request)
        return client.reply(is_head=is_head)


def chunk(data: bytes) -> bytes:
    """One chunk of a body; an empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def post(target: str = "/generate", body: bytes = b"{}", fields: str = "") -> bytes:
    """The bytes of a plain request; `fields` are more header lines, each with its CRLF."""
    head = f"POST {target} HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n{fields}\r\n"
    return head.encode("latin-1") + body
