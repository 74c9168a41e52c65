"""A rank that is not the leader: find rank 0, follow it, and follow again whenever it was lost."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from sglang_afd.errors import AfdError, ProtocolError, Refused
from sglang_afd.protocol import codec
from sglang_afd.protocol.messages import Refusal, RunUnit
from sglang_afd.transport.base import Event, LeaderFound, LeaderLost, Ordered
from sglang_afd.transport.zmq_handshake import Connection, GreetOptions, open_connection, shake

logger = logging.getLogger(__name__)

RETRY_S = 0.5


class ZmqFollower:
    """A thread of its own finds and greets rank 0; what rank 0 says is read by the loop's thread.

    Args:
        find: Names rank 0's exchange address, or raises AfdError.
        options: Who follows.
        rank: Ours, 1 or above.
    """

    def __init__(self, find: Callable[[], str], options: GreetOptions, *, rank: int) -> None:
        self._find = find
        self._options = options
        self._rank = rank
        self._context = zmq.Context()
        self._fresh: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._is_wanted = threading.Event()
        self._is_wanted.set()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="afd-follow", daemon=True)
        self._thread.start()

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for events, in the loop's thread."""
        connection = self._connection
        return [connection.socket, connection.monitor] if connection is not None else []

    def adopt(self) -> list[Event]:
        """Take over a connection that was made meanwhile; in the loop's thread."""
        if self._connection is not None:
            return []
        try:
            self._connection = self._fresh.get_nowait()
        except queue.Empty:
            return []
        return [LeaderFound()]

    def take(self) -> list[Event]:
        """What rank 0 said, without waiting; in the loop's thread."""
        return self._read(self._connection) if self._connection is not None else []

    def close(self) -> None:
        """Free everything; in the loop's thread."""
        self._is_closing.set()
        self._is_wanted.set()
        self._thread.join()
        while not self._fresh.empty():
            self._fresh.get_nowait().close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._context.term()

    def _read(self, connection: Connection) -> list[Event]:
        events: list[Event] = []
        try:
            while True:
                frame = connection.socket.recv(zmq.DONTWAIT)
                events.append(Ordered(order=_order_in(frame)))
        except zmq.Again:
            pass
        except (ProtocolError, Refused) as error:
            return [*events, self._lose(connection, str(error))]
        while int(connection.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(connection.monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                return [*events, self._lose(connection, "its connection ended")]
        return events

    def _lose(self, connection: Connection, reason: str) -> LeaderLost:
        connection.close()
        self._connection = None
        self._is_wanted.set()
        logger.warning("lost rank 0: %s", reason)
        return LeaderLost(reason=reason)

    def _run(self) -> None:
        said = ""
        while True:
            self._is_wanted.wait()
            # First of all: what is wanted from here on, by `close` too, must not be cleared.
            self._is_wanted.clear()
            if self._is_closing.is_set():
                return
            try:
                self._fresh.put(self._follow())
                logger.info("following rank 0")
                said = ""
            except (AfdError, zmq.ZMQError) as error:
                if str(error) != said:
                    logger.warning("rank 0 is not followed yet: %s", error)
                    said = str(error)
                self._is_closing.wait(RETRY_S)
                self._is_wanted.set()

    def _follow(self) -> Connection:
        address = self._find()
        connection = open_connection(self._context, address, self._options)
        try:
            shake(
                connection.socket,
                address,
                self._options,
                follower_rank=self._rank,
                is_over=lambda: self._is_closing.is_set() or connection.is_cut(),
            )
        except BaseException:
            connection.close()
            raise
        return connection


def _order_in(frame: bytes) -> RunUnit:
    match codec.decode_to_follower(frame):
        case RunUnit() as order:
            return order
        case Refusal(code=code, message=message):
            raise Refused(code, message)
        case other:
            raise ProtocolError(f"rank 0 sent {type(other).__name__}, expected RunUnit")
