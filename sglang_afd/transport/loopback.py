"""Both sides in one process, for tests: the same gate, sessions and slots, and no sockets."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from sglang_afd.errors import ExchangeFailed, PeerLost, ProtocolError
from sglang_afd.protocol import codec
from sglang_afd.protocol.handshake import Gate, Greeter
from sglang_afd.protocol.messages import (
    Attached,
    Challenge,
    Dispatch,
    ModelSpec,
    Refusal,
    RefusalCode,
    RunUnit,
    StepIntent,
    ToAttn,
    Withdrawal,
)
from sglang_afd.transport.base import (
    Event,
    Exchange,
    Hub,
    LeaderFound,
    LeaderLost,
    Link,
    Ordered,
    Rows,
    check_group,
)
from sglang_afd.transport.sessions import Frame, Sessions
from sglang_afd.transport.slots import Slots

_Message = tuple[int, list[Frame]]  # rank, frames

_LEADER = b"leader"


class _Outbox(Protocol):
    def put(self, message: _Message) -> None: ...


class _Ear:
    """Where rank 0 puts what it says to a rank that follows: into that rank's inbox."""

    def __init__(self, inbox: queue.Queue[tuple[bytes, list[Frame]]]) -> None:
        self._inbox = inbox

    def put(self, message: _Message) -> None:
        """See `queue.Queue`."""
        self._inbox.put((_LEADER, message[1]))


def _own(frames: Sequence[Frame]) -> list[Frame]:
    return [bytes(frame) for frame in frames]


class LoopbackHub(Hub):
    """One MLP rank; links reach it as an object."""

    def __init__(self, gate: Gate) -> None:
        self.address = "loopback"
        self._sessions = Sessions(gate)
        self._inbox: queue.Queue[tuple[bytes, list[Frame]]] = queue.Queue()
        self._outboxes: dict[bytes, tuple[int, _Outbox]] = {}
        self._events: list[Event] = []
        self._greeter: Greeter | None = None  # of a rank that follows
        self._leader: LoopbackHub | None = None
        self._name = b""  # there
        self._lock = threading.Lock()

    @property
    def num_refused(self) -> int:
        """See `Hub`."""
        return self._sessions.num_refused

    def connect(self, peer: bytes, rank: int, outbox: _Outbox) -> None:
        """Open a connection; what this hub sends to `peer` goes into `outbox`."""
        with self._lock:
            self._outboxes[peer] = (rank, outbox)

    def disconnect(self, peer: bytes, reason: str) -> None:
        """The connection of `peer` ends."""
        with self._lock:
            self._outboxes.pop(peer, None)
            self._events += self._sessions.gone(peer, reason)

    def follow(self, leader: LoopbackHub, spec: ModelSpec, secret: bytes, *, rank: int) -> None:
        """Hear what `leader` says, once it was polled."""
        server_id = f"mlp-{rank}-{id(self):x}"  # two ranks may contend for one place
        self._leader, self._name = leader, server_id.encode()
        self._greeter = Greeter(server_id, spec, secret, follower_rank=rank)
        leader.connect(self._name, rank, _Ear(self._inbox))
        leader.deliver(self._name, [codec.encode(self._greeter.hello())])

    def deliver(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """What `peer` sends."""
        self._inbox.put((peer, _own(frames)))

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Hub`."""
        with self._lock:
            events, self._events = self._events, []
        try:
            peer, frames = self._inbox.get(timeout=0.0001 if events else timeout_s)
        except queue.Empty:
            return events
        if peer == _LEADER:
            return events + self._hear(frames)
        more, messages = self._sessions.receive(peer, frames)
        for to, said in messages:
            self._send(to, said)
        return events + more

    def reply(self, exchange: Exchange, partial: Tensor) -> None:
        """See `Hub`."""
        self._send(exchange.peer, self._sessions.combine_frames(exchange, partial))

    def decline(self, exchange: Exchange, code: RefusalCode, message: str) -> None:
        """See `Hub`."""
        self._send(exchange.peer, self._sessions.failed_frames(exchange, code, message))

    def order(self, unit: RunUnit) -> None:
        """See `Hub`."""
        for peer in self._sessions.followers:
            self._send(peer, [codec.encode(unit)])

    def expel(self, reason: str) -> list[Event]:
        """See `Hub`."""
        events, messages = self._sessions.expel(reason)
        for peer, frames in messages:
            self._send(peer, frames)
        return events

    def close(self) -> None:
        """See `Hub`; attached links learn that the rank is gone."""
        if self._leader is not None:
            self._leader.disconnect(self._name, "its connection ended")
        with self._lock:
            outboxes, self._outboxes = self._outboxes, {}
        for rank, outbox in outboxes.values():
            outbox.put((rank, []))

    def _hear(self, frames: Sequence[Frame]) -> list[Event]:
        assert self._greeter is not None and self._leader is not None
        if not frames:
            return [LeaderLost(reason="its connection ended")]
        match codec.decode_to_follower(frames[0]):
            case RunUnit() as order:
                return [Ordered(order=order)]
            case Attached():
                return [LeaderFound()]
            case Refusal(message=message):
                return [LeaderLost(reason=message)]
            case Challenge() as challenge:
                attach = self._greeter.answer(challenge, epoch=0)
                self._leader.deliver(self._name, [codec.encode(attach)])
                return []

    def _send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        with self._lock:
            connection = self._outboxes.get(peer)
        if connection is not None:
            rank, outbox = connection
            outbox.put((rank, _own(frames)))


class LoopbackLink(Link):
    """Attached to `hubs`, rank 0 first, when the constructor returns; another thread polls them."""

    def __init__(
        self,
        hubs: Sequence[LoopbackHub],
        *,
        server_id: str,
        spec: ModelSpec,
        secret: bytes = b"",
        stall_timeout_s: float,
    ) -> None:
        self._hubs = list(hubs)
        self._peer = server_id.encode()
        self._stall_timeout_s = stall_timeout_s
        self._inbox: queue.Queue[_Message] = queue.Queue()
        self._lost: str | None = None
        attached: list[Attached] = []
        for rank, hub in enumerate(hubs):
            hub.connect(self._peer, rank, self._inbox)
            greeter = Greeter(server_id, spec, secret)
            hub.deliver(self._peer, [codec.encode(greeter.hello())])
            epoch = attached[0].epoch if attached else 0
            attach = greeter.answer(self._next_message(), epoch=epoch)
            hub.deliver(self._peer, [codec.encode(attach)])
            attached.append(greeter.accepted(self._next_message()))
        self.ranks = check_group(attached, [hub.address for hub in hubs], spec.num_experts)
        self.epoch = attached[0].epoch
        self._slots = Slots(spec, len(attached))

    @property
    def lost(self) -> str | None:
        """See `Link`."""
        return self._lost

    def dispatch(self, header: Dispatch, rows: Rows) -> None:
        """See `Link`."""
        self.raise_if_lost()
        frames = self._slots.put(header, rows)
        for hub in self._hubs:
            hub.deliver(self._peer, frames)

    def announce(self, message: StepIntent | Withdrawal) -> None:
        """See `Link`."""
        if self._lost is None and self._hubs:
            self._hubs[0].deliver(self._peer, [codec.encode(message)])

    def combine(self, micro_batch_id: int, *, limit_s: float = math.inf) -> Tensor:
        """See `Link`."""
        deadline = min(time.monotonic() + self._stall_timeout_s, limit_s)
        while not self._slots.is_whole(micro_batch_id):
            try:
                rank, frames = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = self._slots.missing(micro_batch_id)
                self.mark_lost(f"MLP rank(s) {missing} did not reply in time")
            self.raise_if_lost()
            if not frames:
                self.mark_lost(f"the connection to MLP rank {rank} ended")
                self.raise_if_lost()
            try:
                self._slots.receive(rank, frames)
            except ExchangeFailed as error:
                self.mark_lost(str(error))
                raise
            except (PeerLost, ProtocolError) as error:
                self.mark_lost(str(error))
                self.raise_if_lost()
        return self._slots.take(micro_batch_id)

    def mark_lost(self, reason: str) -> None:
        """See `Link`."""
        if self._lost is None:
            self._lost = reason
            self._inbox.put((0, []))

    def close(self) -> None:
        """See `Link`."""
        hubs, self._hubs = self._hubs, []
        for hub in hubs:
            reason = "detached" if self._lost is None else "its connection ended"
            hub.disconnect(self._peer, reason)

    def _next_message(self) -> ToAttn:
        try:
            _, frames = self._inbox.get(timeout=self._stall_timeout_s)
        except queue.Empty:
            raise PeerLost("an MLP rank did not answer the handshake") from None
        return codec.decode_to_attn(frames[0])
