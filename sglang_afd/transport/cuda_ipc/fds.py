"""One bounded message over a Unix socket, with file descriptors beside it."""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_afd.errors import PeerLost, ProtocolError

MAX_PARCEL_BYTES = 4096
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_INT_BYTES = array.array("i").itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """What came; whoever holds it closes the descriptors."""

    body: bytes
    fds: tuple[int, ...]

    def close(self) -> None:
        """Close the descriptors; once."""
        close_all(self.fds)


def send(connection: socket.socket, body: bytes, fds: Sequence[int] = ()) -> None:
    """Send a message; the descriptors stay ours, the other side gets copies.

    Raises:
        PeerLost: The other side is gone, or did not read in time.
    """
    frame = _LENGTH.pack(len(body)) + body
    try:
        sent = socket.send_fds(connection, [frame], list(fds)) if fds else 0
        connection.sendall(frame[sent:])
    except OSError as error:
        raise PeerLost(f"a message could not be sent over a Unix socket: {error}") from None


def receive(connection: socket.socket, *, num_fds: int, timeout_s: float) -> Parcel:
    """Wait for one message with at most `num_fds` descriptors; on an error none stays open.

    Raises:
        PeerLost: The other side is gone, or said nothing in time.
        ProtocolError: The message is too long, or has more descriptors.
    """
    fds: list[int] = []
    try:
        reader = _Reader(connection, fds, num_fds, time.monotonic() + timeout_s)
        [length] = _LENGTH.unpack(reader.read(_LENGTH.size))
        if length > MAX_PARCEL_BYTES:
            raise ProtocolError(
                f"a message of {length} bytes came over a Unix socket; at most "
                f"{MAX_PARCEL_BYTES} are allowed"
            )
        return Parcel(body=reader.read(length), fds=tuple(fds))
    except BaseException:
        close_all(fds)
        raise


def user_of(connection: socket.socket) -> int:
    """Who is at the other end, as the kernel knows it."""
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def close_all(fds: Iterable[int]) -> None:
    """Close each descriptor."""
    for fd in fds:
        os.close(fd)


class _Reader:
    """Reads so many bytes before a deadline, and keeps what descriptors come beside them."""

    def __init__(
        self, connection: socket.socket, fds: list[int], num_fds: int, deadline_s: float
    ) -> None:
        self._connection = connection
        self._fds = fds
        self._num_fds = num_fds
        self._deadline_s = deadline_s

    def read(self, size: int) -> bytes:
        body = b""
        while len(body) < size:
            body += self._some(size - len(body))
        return body

    def _some(self, size: int) -> bytes:
        left_s = self._deadline_s - time.monotonic()
        room = socket.CMSG_SPACE(self._num_fds * _INT_BYTES) if self._num_fds else 0
        try:
            if left_s <= 0:
                raise TimeoutError("timed out")
            self._connection.settimeout(left_s)
            chunk, ancillary, flags, _ = self._connection.recvmsg(
                size, room, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise PeerLost(f"no message came over a Unix socket: {error}") from None
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) // _INT_BYTES * _INT_BYTES
                self._fds += array.array("i", data[:whole])
        if flags & socket.MSG_CTRUNC or len(self._fds) > self._num_fds:
            raise ProtocolError(f"a message has more than {self._num_fds} file descriptors")
        if not chunk:
            raise PeerLost("the other end of a Unix socket was closed")
        return chunk
