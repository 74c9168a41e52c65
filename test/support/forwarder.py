"""A TCP forwarder that can lose every packet without closing anything, as a broken network does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Forwarder:
    """Carries bytes between whoever connects to `port` and `127.0.0.1:target_port`.

    While it is cut, connections stay open, new ones are accepted, and nothing gets through; what is
    on its way arrives afterwards, as TCP would send it again.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._passes = threading.Event()
        self._passes.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept)

    def cut(self) -> None:
        """From now on nothing gets through."""
        self._passes.clear()

    def mend(self) -> None:
        """From now on everything gets through again."""
        self._passes.set()

    def close(self) -> None:
        """End every connection and thread."""
        self._passes.set()
        for one in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _start(self, target: object, *args: object) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target_port))
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                self._start(self._carry, client, server)
                self._start(self._carry, server, client)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                self._passes.wait()
                target.sendall(chunk)
        self._passes.wait()
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def forwarding(target_port: int) -> Iterator[Forwarder]:
    """A forwarder for as long as the block runs."""
    forwarder = Forwarder(target_port)
    try:
        yield forwarder
    finally:
        forwarder.close()
