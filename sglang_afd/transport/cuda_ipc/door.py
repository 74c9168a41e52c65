"""The socket of an MLP rank to which attention servers bring their slots, as file descriptors."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sglang_afd.errors import AfdError, PeerLost, ProtocolError, Refused
from sglang_afd.protocol import codec
from sglang_afd.protocol.messages import FromDoor, OpenSlots, Refusal, RefusalCode, SlotsOpened
from sglang_afd.transport.cuda_ipc import fds
from sglang_afd.transport.private_path import private_path

logger = logging.getLogger(__name__)

NUM_FDS = 2  # the slots' memory, the page of their doorbells
READ_TIMEOUT_S = 1.0  # for a message that was sent before or right after connecting
_BACKLOG = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """An attention server stands at the door; answer it once, which closes what it brought."""

    message: OpenSlots
    slots: fds.Parcel
    connection: socket.socket

    @property
    def fds(self) -> tuple[int, int]:
        """Of the slots' memory and of their doorbells; ours until `answer`."""
        memory, doorbells = self.slots.fds
        return memory, doorbells

    def answer(self, message: FromDoor) -> None:
        """Say how it went, and close all; who left meanwhile is told by its connection."""
        if isinstance(message, Refusal):
            logger.warning("slots of %s are refused: %s", self.message.server_id, message.message)
        with self.connection, suppress(PeerLost):
            self.slots.close()
            fds.send(self.connection, codec.encode(message))


class Door:
    """Listens at `address`; a thread of its own reads, the hub's thread takes and answers.

    Args:
        path: Where to listen; "" makes a directory of mode 0700.
        owner: The user whose processes may come; -1 is our own.
    """

    def __init__(self, path: str = "", *, owner: int = -1) -> None:
        self.address = path or private_path("door")
        self._owner = os.getuid() if owner == -1 else owner
        self._visits: queue.SimpleQueue[Visit] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(self.address)
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._run, name="afd-door", daemon=True)
        self._thread.start()

    def take(self) -> list[Visit]:
        """Who came since the last call; each wants an answer."""
        visits: list[Visit] = []
        with suppress(queue.Empty):
            while True:
                visits.append(self._visits.get_nowait())
        return visits

    def close(self) -> None:
        """End the thread and send away who waits; idempotent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()
        Path(self.address).unlink(missing_ok=True)
        for visit in self.take():
            visit.answer(Refusal(code=RefusalCode.EPOCH, message="this MLP server ends"))

    def _run(self) -> None:
        while not self._is_closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # closing, or no descriptor is free
                if not self._is_closing.wait(READ_TIMEOUT_S):
                    logger.warning("the door at %s cannot accept: %s", self.address, error)
                continue
            try:
                self._visits.put(self._read(connection))
            except (AfdError, OSError) as error:
                logger.warning("whoever came to the door was sent away: %s", error)
                self._send_away(connection, str(error))

    def _read(self, connection: socket.socket) -> Visit:
        user = fds.user_of(connection)
        if user != self._owner:
            raise ProtocolError(
                f"user {user} came, only user {self._owner} may; run both roles as one user, "
                f"or with --afd-transport zmq"
            )
        parcel = fds.receive(connection, num_fds=NUM_FDS, timeout_s=READ_TIMEOUT_S)
        try:
            message = codec.decode_to_door(parcel.body)
            if len(parcel.fds) != NUM_FDS:
                raise ProtocolError(
                    f"{len(parcel.fds)} file descriptors came with the slots, expected {NUM_FDS}"
                )
        except BaseException:
            parcel.close()
            raise
        connection.setblocking(False)  # an answer fits into the socket, or its reader is gone
        return Visit(message=message, slots=parcel, connection=connection)

    def _send_away(self, connection: socket.socket, reason: str) -> None:
        with connection, suppress(PeerLost):
            connection.setblocking(False)
            fds.send(connection, codec.encode(Refusal(code=RefusalCode.PROTOCOL, message=reason)))


def bring(
    door: str, message: OpenSlots, slots: tuple[int, int], *, timeout_s: float
) -> SlotsOpened:
    """Hand our slots to the rank behind a door, and wait until it has opened them.

    Raises:
        PeerLost: Nobody is there, or did not answer in time.
        Refused: The rank declined, and why; or somebody else listens there.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(door)
        except OSError as error:
            raise PeerLost(f"the MLP server's door at {door} is closed: {error}") from None
        if (user := fds.user_of(connection)) != os.getuid():
            raise Refused(
                RefusalCode.PROTOCOL,
                f"the door at {door} belongs to user {user}, this server runs as {os.getuid()}; "
                f"run both roles as one user, or with --afd-transport zmq",
            )
        with suppress(PeerLost):  # whoever sends us away before that has said why
            fds.send(connection, codec.encode(message), slots)
        try:
            parcel = fds.receive(connection, num_fds=0, timeout_s=timeout_s)
            answer = codec.decode_from_door(parcel.body)
        except ProtocolError as error:
            raise Refused(RefusalCode.PROTOCOL, f"{door}: {error}") from None
    if isinstance(answer, Refusal):
        raise Refused(answer.code, answer.message)
    return answer
