"""Connect to an MLP rank and pass its handshake, as links and ranks that follow do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from sglang_afd.errors import ConfigError, PeerLost, ProtocolError, Refused
from sglang_afd.protocol import codec
from sglang_afd.protocol.handshake import Greeter
from sglang_afd.protocol.messages import (
    Attach,
    Attached,
    Hello,
    ModelSpec,
    RefusalCode,
    ToAttn,
)
from sglang_afd.transport.zmq_options import configure

Socket = zmq.Socket[bytes]
_LOOK_MS = 100  # between two looks at whether the answer is still wanted
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED  # the latter where nobody listens


@dataclass(frozen=True, kw_only=True, slots=True)
class GreetOptions:
    """Who connects, and how long it waits."""

    server_id: str
    spec: ModelSpec
    secret: bytes
    heartbeat_timeout_s: float  # silence after which a rank counts as gone
    handshake_timeout_s: float = 5.0  # for each answer of the handshake


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """A socket and the monitor that tells when it is cut."""

    socket: Socket
    monitor: Socket

    def is_cut(self) -> bool:
        """Has it ended, or never begun? For the thread that reads the monitor."""
        return bool(self.monitor.poll(0))

    def close(self) -> None:
        """In one thread; ZeroMQ blocks in a monitored socket whose monitor was closed first."""
        self.socket.disable_monitor()
        self.socket.close(0)
        self.monitor.close(0)


def open_connection(
    context: zmq.Context[Socket], address: str, options: GreetOptions
) -> Connection:
    """Begin to connect; nothing has been said yet.

    Raises:
        ConfigError: ZeroMQ cannot use the address.
    """
    socket = context.socket(zmq.DEALER)
    configure(socket, address, options.spec, options.heartbeat_timeout_s)
    # NOTE: a restarted server is another peer; it is met by a new handshake, not a reconnect.
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    connection = Connection(socket=socket, monitor=socket.get_monitor_socket(_ENDS))
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        connection.close()
        raise ConfigError(f"exchange address {address} is not usable: {error}") from None
    return connection


def shake(
    socket: Socket,
    address: str,
    options: GreetOptions,
    *,
    epoch: int = 0,
    follower_rank: int = -1,
    is_over: Callable[[], bool] = lambda: False,
) -> Attached:
    """Pass the handshake, unless `is_over` says that nobody wants it any more.

    Raises:
        Refused: The rank declined, and why.
        PeerLost: The rank did not answer.
    """
    greeter = Greeter(options.server_id, options.spec, options.secret, follower_rank=follower_rank)
    try:
        challenge = _ask(socket, address, greeter.hello(), options.handshake_timeout_s, is_over)
        attach = greeter.answer(challenge, epoch=epoch)
        answer = _ask(socket, address, attach, options.handshake_timeout_s, is_over)
        return greeter.accepted(answer)
    except ProtocolError as error:
        raise Refused(RefusalCode.PROTOCOL, f"{address}: {error}") from None


def try_send(socket: Socket, frame: bytes) -> bool:
    """Send without waiting; False where it cannot go, since the peer went or its queue is full."""
    with suppress(zmq.ZMQError):
        socket.send(frame, zmq.DONTWAIT)
        return True
    return False


def _ask(
    socket: Socket,
    address: str,
    message: Hello | Attach,
    timeout_s: float,
    is_over: Callable[[], bool],
) -> ToAttn:
    if not try_send(socket, codec.encode(message)):  # a rank that went takes its queue along
        raise PeerLost(f"the MLP server at {address} went away while attaching")
    deadline_s = time.monotonic() + timeout_s
    while not socket.poll(min(_LOOK_MS, round(timeout_s * 1000))):
        if is_over():
            raise PeerLost(f"the MLP server at {address} is not there, or went away")
        if time.monotonic() >= deadline_s:
            raise PeerLost(f"no MLP server answered at {address} within {timeout_s:g} s")
    return codec.decode_to_attn(socket.recv_multipart()[0])
