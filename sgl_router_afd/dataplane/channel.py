"""One end of the socket between the control process and a relay process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from sgl_router_afd.dataplane.messages import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    ToControl,
    ToRelay,
    encode,
)

Received = TypeVar("Received")


class Channel(asyncio.Protocol, Generic[Received]):
    """Sends messages and delivers those of the other end.

    Args:
        kind: The union of the messages that may come.
        on_message: Called with each.
        on_lost: Called when the other end is gone, or sends something that is no message.
    """

    def __init__(
        self, kind: Any, on_message: Callable[[Received], None], on_lost: Callable[[], None]
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._on_message = on_message
        self._on_lost = on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._is_full = False
        self._latest: bytes | None = None  # waits while the other end does not read

    def send_latest(self, encoded: bytes) -> None:
        """Send a message that stands for all of its kind before it.

        While the other end does not read, only the last of them is kept: one that was stopped must
        not fill this process's memory.
        """
        if self._is_full:
            self._latest = encoded
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(encoded)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._latest is not None:
            encoded, self._latest = self._latest, None
            self.send_latest(encoded)

    def send(self, message: ToRelay | ToControl) -> None:
        """Send the message, unless the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "big")
            if end > MAX_MESSAGE_BYTES:
                self.close()
                return
            if len(self._received) < end:
                return
            body = bytes(self._received[LENGTH_BYTES:end])
            del self._received[:end]
            self._on_message(self._decoder.decode(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()
