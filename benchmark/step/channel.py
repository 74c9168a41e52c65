"""JSON lines between the benchmark and its child processes, over a Unix socket."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class ChannelClosed(Exception):
    """The other side ended."""


class Channel:
    """One connection; a message is one line."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises ChannelClosed when nobody reads."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> Message:
        """Wait for the next message; raises ChannelClosed at the end."""
        while (message := self.take()) is None:
            self.read()
        return message

    def take(self) -> Message | None:
        """The next message that has been read already."""
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        message: Message = json.loads(line)
        return message

    def read(self) -> None:
        """Read what is there, at least something; raises ChannelClosed at the end."""
        try:
            data = self._socket.recv(1 << 20)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not data:
            raise ChannelClosed("the other process ended")
        self._buffer += data

    def close(self) -> None:
        """The other side sees the end."""
        with contextlib.suppress(OSError):
            self._socket.close()


def connect(path: str) -> Channel:
    """To the benchmark, from a child."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    return Channel(connection)


class Door:
    """Where children connect; each says its name first."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)

    def accept(self, deadline_s: float) -> tuple[str, Channel] | None:
        """The next child, or None when none has come until `deadline_s`."""
        if not select.select([self._listener], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            return None
        connection, _ = self._listener.accept()
        channel = Channel(connection)
        return str(channel.receive()["name"]), channel

    def close(self) -> None:
        """No more children."""
        self._listener.close()


def wait_any(channels: Sequence[Channel], deadline_s: float) -> list[Channel]:
    """Those that have something to read; empty when the time is over."""
    timeout_s = max(0.0, deadline_s - time.monotonic())
    return select.select(list(channels), [], [], timeout_s)[0]
