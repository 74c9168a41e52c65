"""The attention side over ZeroMQ: one DEALER socket for each MLP rank of the group."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from sglang_afd.errors import ExchangeFailed, PeerLost, ProtocolError
from sglang_afd.protocol import codec
from sglang_afd.protocol.messages import Attached, Detach, Dispatch, StepIntent, Withdrawal
from sglang_afd.transport.base import Link, Rows, check_group
from sglang_afd.transport.brisk_poller import SPIN_S, BriskPoller
from sglang_afd.transport.slots import Slots
from sglang_afd.transport.zmq_handshake import GreetOptions, open_connection, shake, try_send


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkOptions(GreetOptions):
    """How an attention server attaches and how long it waits."""

    stall_timeout_s: float  # longest wait for one exchange


class ZmqLink(Link):
    """Attached when the constructor returns.

    Args:
        addresses: The exchange address of every MLP rank, rank 0 first.

    Raises:
        Refused: A rank declined, and why.
        PeerLost: A rank did not answer.
        ConfigError: The ranks do not cover every expert once.
    """

    def __init__(self, addresses: Sequence[str], options: LinkOptions) -> None:
        self._options = options
        self._lost: str | None = None
        self._lost_lock = threading.Lock()
        self._closed = False  # closing has begun
        self._is_freed = False
        self.ranks = ()
        self._context = zmq.Context()
        self._wake_in, self._wake_out = self._wake_pair()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        try:
            self.ranks = self._attach_all(addresses)
        except BaseException as error:
            self.close()
            self.close_watch()
            if isinstance(error, zmq.ZMQError):
                raise PeerLost(f"attaching failed: {error}") from None
            raise
        self.epoch = self.ranks[0].epoch
        self._slots = Slots(options.spec, len(self.ranks))
        self._poller = BriskPoller(*self._sockets, self._wake_out)

    @property
    def lost(self) -> str | None:
        """See `Link`."""
        return self._lost

    def dispatch(self, header: Dispatch, rows: Rows) -> None:
        """See `Link`."""
        self.raise_if_lost()
        frames = self._slots.put(header, rows)
        for socket in self._sockets:
            try:
                socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
            except zmq.ZMQError as error:
                self.mark_lost(f"an exchange could not be sent: {error}")
        self.raise_if_lost()

    def announce(self, message: StepIntent | Withdrawal) -> None:
        """See `Link`."""
        if self._lost is None and not self._closed:
            try_send(self._sockets[0], codec.encode(message))

    def combine(self, micro_batch_id: int, *, limit_s: float = math.inf) -> Tensor:
        """See `Link`."""
        deadline_s = time.monotonic() + self._options.stall_timeout_s
        in_time = f"within --afd-stall-timeout {self._options.stall_timeout_s:g} s"
        if limit_s < deadline_s:
            deadline_s, in_time = limit_s, "in the time that its step had left"
        while not self._slots.is_whole(micro_batch_id):
            ready = self._poller.poll(deadline_s - time.monotonic(), spin_s=SPIN_S)
            if not ready:
                missing = self._slots.missing(micro_batch_id)
                self.mark_lost(f"MLP rank(s) {missing} did not reply {in_time}")
            self.raise_if_lost()
            for socket, _ in ready:
                self._receive(socket)
        return self._slots.take(micro_batch_id)

    @property
    def received_ns(self) -> dict[int, int]:
        """When the reply of each rank to the exchange combined last was read, by rank."""
        return self._slots.received_ns

    def hear(self) -> None:
        """Read what ranks said unasked, without waiting; for links whose rows go another way.

        Raises:
            PeerLost: A rank sent us away, or declined an exchange.
        """
        for socket in () if self._closed else self._sockets:
            while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._receive(socket)

    def mark_lost(self, reason: str) -> None:
        """See `Link`; callable from any thread."""
        with self._lost_lock:
            if self._lost is not None or self._closed:
                return
            self._lost = reason
            self._wake_in.send(b"")

    def watch(self, timeout_s: float) -> bool:
        """Look for ranks that went away; called by one other thread than the scheduler's.

        Returns: True while the link serves, False once it is lost or closed.
        """
        with_events = {socket: rank for rank, socket in enumerate(self._monitors)}
        poller = zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        for monitor, _ in poller.poll(round(timeout_s * 1000)):
            event = parse_monitor_message(monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self.mark_lost(f"the connection to MLP rank {with_events[monitor]} ended")
        return self._lost is None and not self._closed

    @property
    def is_closed(self) -> bool:
        """Has `close` returned?"""
        return self._is_freed

    def close_watch(self) -> None:
        """Free what `watch` used, in the thread that called it, and only after `close`.

        NOTE: ZeroMQ blocks in a monitored socket whose monitor was closed first.
        """
        for monitor in self._monitors:
            monitor.close(0)
        self._context.term()

    def close(self) -> None:
        """See `Link`."""
        with self._lost_lock:
            if self._closed:
                return
            self._closed = True
            self._wake_in.close(0)
        self._wake_out.close(0)
        is_attached = self._lost is None and bool(self.ranks)
        for socket in self._sockets:
            socket.disable_monitor()
            if is_attached:
                socket.setsockopt(zmq.LINGER, 200)
                try_send(socket, codec.encode(Detach(epoch=self.epoch)))
            socket.close()
        self._is_freed = True

    def _attach_all(self, addresses: Sequence[str]) -> tuple[Attached, ...]:
        attached: list[Attached] = []
        for address in addresses:
            epoch = attached[0].epoch if attached else 0
            connection = open_connection(self._context, address, self._options)
            self._sockets.append(connection.socket)
            self._monitors.append(connection.monitor)
            attached.append(
                shake(
                    connection.socket,
                    address,
                    self._options,
                    epoch=epoch,
                    is_over=connection.is_cut,
                )
            )
        return check_group(attached, addresses, self._options.spec.num_experts)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        rank = self._sockets.index(socket)
        frames = socket.recv_multipart(copy=False)
        try:
            self._slots.receive(rank, [frame.buffer for frame in frames])
        except ExchangeFailed as error:
            self.mark_lost(str(error))
            raise
        except (PeerLost, ProtocolError) as error:
            self.mark_lost(str(error))
            self.raise_if_lost()

    def _wake_pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        reader = self._context.socket(zmq.PAIR)
        reader.bind("inproc://wake")
        writer = self._context.socket(zmq.PAIR)
        writer.connect("inproc://wake")
        return writer, reader
