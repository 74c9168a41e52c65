"""The MLP side over ZeroMQ: one ROUTER socket for every attention server."""

from __future__ import annotations

import logging
import socket
import time

import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from sglang_afd.errors import ConfigError
from sglang_afd.protocol import codec
from sglang_afd.protocol.handshake import Gate
from sglang_afd.protocol.messages import RefusalCode, RunUnit
from sglang_afd.transport.base import Event, Exchange, Hub
from sglang_afd.transport.brisk_poller import SPIN_S, BriskPoller
from sglang_afd.transport.connections import Connections
from sglang_afd.transport.sessions import Frame, Message, Sessions
from sglang_afd.transport.zmq_follower import ZmqFollower
from sglang_afd.transport.zmq_options import configure

logger = logging.getLogger(__name__)

MAX_BURST = 256  # messages taken in one poll, so that a flood cannot keep the loop from running


class ZmqHub(Hub):
    """Binds `listen` (`ipc://path`, `tcp://host:port`, port 0 picks a free one)."""

    def __init__(self, gate: Gate, listen: str, *, heartbeat_timeout_s: float) -> None:
        self._follower: ZmqFollower | None = None
        _refuse_taken_path(listen)
        self._sessions = Sessions(gate)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, listen, gate.identity.spec, heartbeat_timeout_s)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.bind(listen)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot listen on --afd-listen {listen}: {error}") from None
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._poller = BriskPoller(self._socket, self._monitor)
        self._connections = Connections()
        self._served_at_s = 0.0
        self._unreachable: list[Event] = []  # found while sending, told at the next poll
        self._accepted: list[int] = []  # descriptors of connections, until all they brought is read
        self._ended: list[int] = []

    @property
    def num_refused(self) -> int:
        """See `Hub`."""
        return self._sessions.num_refused

    def follow(self, follower: ZmqFollower) -> None:
        """Hear what rank 0 says, too; closed with this hub."""
        self._follower = follower

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Hub`."""
        events, self._unreachable = self._unreachable, []
        leader: list[zmq.Socket[bytes]] = []
        if self._follower is not None:
            events += self._follower.adopt()
            leader = self._follower.sockets
        has_ends = bool(self._ended)  # heard of as the last thing of a burst, which wakes nobody
        timeout_s = 0.0 if events or has_ends else timeout_s
        if not self._poller.poll(timeout_s, spin_s=self._spin_s(), also=leader) and not has_ends:
            return events
        if self._follower is not None:
            events += self._follower.take()
        self._served_at_s = time.monotonic()
        for _ in range(MAX_BURST):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                if self._hear_of_ends():
                    continue  # what a connection brought before its end may have come meanwhile
                return events + self._settle()
            events += self._receive(frames)
        return events

    def _spin_s(self) -> float:
        return max(0.0, self._served_at_s + SPIN_S - time.monotonic())

    def reply(self, exchange: Exchange, partial: Tensor) -> None:
        """See `Hub`."""
        self._send(exchange.peer, self._sessions.combine_frames(exchange, partial))

    def decline(self, exchange: Exchange, code: RefusalCode, message: str) -> None:
        """See `Hub`."""
        self._send(exchange.peer, self._sessions.failed_frames(exchange, code, message))

    def order(self, unit: RunUnit) -> None:
        """See `Hub`."""
        frames: list[Frame] = [codec.encode(unit)]
        for peer in self._sessions.followers:
            self._send(peer, frames)

    def expel(self, reason: str) -> list[Event]:
        """See `Hub`."""
        events, messages = self._sessions.expel(reason)
        self._send_all(messages)
        return events

    def dismiss(self, peer: bytes, reason: str) -> list[Event]:
        """Send one attention server away, to attach again; returns that it is gone."""
        events, messages = self._sessions.dismiss(peer, reason)
        self._send_all(messages)
        return events

    def close(self) -> None:
        """See `Hub`."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
            self._context.term()

    def _receive(self, frames: list[zmq.Frame]) -> list[Event]:
        peer = frames[0].bytes
        if not self._connections.is_known(peer) and len(frames) > 1:
            descriptor = _descriptor_of(frames[1])
            if descriptor is None:
                return []  # its connection has ended already; there is nobody to answer
            self._connections.spoke(peer, descriptor)
        body: list[Frame] = [frame.buffer for frame in frames[1:]]
        events, messages = self._sessions.receive(peer, body or [b""])
        self._send_all(messages)
        return events

    def _hear_of_ends(self) -> bool:
        """Take what is told of connections; has one of them ended since the last time?"""
        num_ended = len(self._ended)
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart())
            told = self._ended if event["event"] == zmq.EVENT_DISCONNECTED else self._accepted
            told.append(int(event["value"]))
        return len(self._ended) > num_ended

    def _settle(self) -> list[Event]:
        gone = self._connections.settle(self._accepted, self._ended)
        self._accepted, self._ended = [], []
        return [
            event for peer in gone for event in self._sessions.gone(peer, "its connection ended")
        ]

    def _send_all(self, messages: list[Message]) -> None:
        for peer, frames in messages:
            self._send(peer, frames)

    def _send(self, peer: bytes, frames: list[Frame]) -> None:
        try:
            self._socket.send_multipart([peer, *frames], zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            logger.warning("peer %s left before its reply was sent", peer.hex())
            self._unreachable += self._sessions.gone(peer, "it can no longer be reached")


def _descriptor_of(frame: zmq.Frame) -> int | None:
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _refuse_taken_path(listen: str) -> None:
    """ZeroMQ would take over the path of a server that still listens there."""
    if not listen.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(listen.removeprefix("ipc://"))
        except TimeoutError:
            pass  # somebody listens, and does not answer
        except OSError:
            return  # nobody listens; a file that a dead server left is replaced
    raise ConfigError(
        f"another process listens on --afd-listen {listen}; stop it or choose another path"
    )
