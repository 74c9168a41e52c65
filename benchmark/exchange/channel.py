"""What the two processes say to each other, over a Unix socket that one inherits."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

from sglang_afd.transport.cuda_ipc import fds

TIMEOUT_S = 120.0


class Channel:
    """Messages, with descriptors beside them where there are any."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(TIMEOUT_S)

    def say(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message."""
        fds.send(self._connection, json.dumps(message).encode(), descriptors)

    def hear(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Wait for a message and its descriptors, which are ours then."""
        parcel = fds.receive(self._connection, num_fds=2, timeout_s=TIMEOUT_S)
        return json.loads(parcel.body), parcel.fds

    def ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a message and wait for the answer."""
        self.say(message, descriptors)
        return self.hear()[0]
