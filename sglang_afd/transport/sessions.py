"""The MLP side of a transport without its sockets: frames in; events and answers out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from sglang_afd.errors import AfdError, CapacityError, EpochMismatch, ProtocolError
from sglang_afd.protocol import codec
from sglang_afd.protocol.handshake import Gate, Session
from sglang_afd.protocol.messages import (
    MAX_MICRO_BATCHES,
    Attach,
    Challenge,
    Combine,
    Detach,
    Dispatch,
    Failed,
    Hello,
    Refusal,
    RefusalCode,
    StepIntent,
    Withdrawal,
)
from sglang_afd.transport.base import (
    Announced,
    Arrived,
    Event,
    Exchange,
    FollowerGone,
    FollowerJoined,
    PeerAttached,
    PeerGone,
)
from sglang_afd.transport.frames import to_frame, unpack_rows

logger = logging.getLogger(__name__)

WIRE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

Frame = bytes | memoryview
Message = tuple[bytes, list[Frame]]  # connection, frames


class Sessions:
    """Checks every frame of every connection, so that the loop only ever sees sound exchanges."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._spec = gate.identity.spec
        self._dtype = WIRE_DTYPES[self._spec.dtype]
        self._layers = frozenset(self._spec.moe_layer_ids)
        self._sessions: dict[bytes, Session] = {}
        self._followers: dict[int, bytes] = {}  # by rank
        self._occupied: set[tuple[bytes, int]] = set()  # slots whose exchange is not answered
        self.num_refused = 0  # messages declined since the start

    @property
    def num_peers(self) -> int:
        """Attention servers attached now."""
        return len(self._sessions) - len(self._followers)

    @property
    def followers(self) -> list[bytes]:
        """The ranks that follow, as connections."""
        return list(self._followers.values())

    def receive(self, peer: bytes, frames: Sequence[Frame]) -> tuple[list[Event], list[Message]]:
        """Take one multipart message; returns what happened and what to say at once, to whom."""
        try:
            message = codec.decode_to_mlp(frames[0])
            match message:
                case Hello():
                    self._refuse_attached(peer)
                    return [], self._answer(peer, self._gate.on_hello(peer, message))
                case Attach():
                    return self._attach(peer, message)
                case Detach():
                    self._session(peer, message.epoch)
                    return self.gone(peer, "detached"), []
                case Dispatch():
                    exchange = self._check(peer, message, frames)
                    self._occupied.add((peer, message.micro_batch_id))
                    return [Arrived(exchange=exchange)], []
                case StepIntent() | Withdrawal():
                    self._session(peer, message.epoch)
                    return [Announced(peer=peer, message=message)], []
                case _:
                    assert_never(message)
        except AfdError as error:
            return [], self._answer(peer, Refusal(code=_code_of(error), message=str(error)))

    def gone(self, peer: bytes, reason: str) -> list[Event]:
        """The connection of `peer` ended."""
        self._gate.forget(peer)
        self._occupied = {slot for slot in self._occupied if slot[0] != peer}
        session = self._sessions.pop(peer, None)
        if session is None:
            return []
        if session.follower_rank != -1:
            self._followers.pop(session.follower_rank)
            return [FollowerGone(rank=session.follower_rank)]
        return [PeerGone(peer=peer, server_id=session.server_id, reason=reason)]

    def expel(self, reason: str) -> tuple[list[Event], list[Message]]:
        """End every attention server's session; returns that, and what to tell each."""
        attached = [peer for peer, session in self._sessions.items() if session.follower_rank == -1]
        return self._send_away(attached, reason)

    def dismiss(self, peer: bytes, reason: str) -> tuple[list[Event], list[Message]]:
        """End one attention server's session; returns that, and what to tell it."""
        return self._send_away([peer] if peer in self._sessions else [], reason)

    def combine_frames(self, exchange: Exchange, partial: Tensor) -> list[Frame]:
        """The reply to one exchange; its slot is free again."""
        header = exchange.header
        if partial.dtype != self._dtype or partial.shape != exchange.rows.hidden_states.shape:
            raise AssertionError(
                f"partial sum is {tuple(partial.shape)} {partial.dtype}, expected "
                f"{tuple(exchange.rows.hidden_states.shape)} {self._dtype}"
            )
        self._occupied.discard((exchange.peer, header.micro_batch_id))
        combine = Combine(
            epoch=header.epoch,
            step=header.step,
            layer_id=header.layer_id,
            micro_batch_id=header.micro_batch_id,
            num_rows=header.num_rows,
        )
        return [codec.encode(combine), to_frame(partial)]

    def failed_frames(self, exchange: Exchange, code: RefusalCode, message: str) -> list[Frame]:
        """The answer to an exchange that has no result; its slot is free again."""
        header = exchange.header
        self._occupied.discard((exchange.peer, header.micro_batch_id))
        failed = Failed(
            epoch=header.epoch,
            step=header.step,
            layer_id=header.layer_id,
            micro_batch_id=header.micro_batch_id,
            code=code,
            message=message,
        )
        return [codec.encode(failed)]

    def _refuse_attached(self, peer: bytes) -> None:
        if peer in self._sessions:
            raise ProtocolError("this connection is already attached; detach first")

    def _send_away(self, peers: Sequence[bytes], reason: str) -> tuple[list[Event], list[Message]]:
        refusal = Refusal(code=RefusalCode.EPOCH, message=f"{reason}; attach again")
        events = [event for peer in peers for event in self.gone(peer, reason)]
        return events, [(peer, [codec.encode(refusal)]) for peer in peers]

    def _attach(self, peer: bytes, attach: Attach) -> tuple[list[Event], list[Message]]:
        outcome = self._gate.on_attach(peer, attach, num_peers=self.num_peers)
        if isinstance(outcome, Refusal):
            return [], self._answer(peer, outcome)
        session, attached = outcome
        answer: Message = (peer, [codec.encode(attached)])
        if session.follower_rank != -1:
            events, messages = self._follow(peer, session)
            return events, [*messages, answer]
        self._sessions[peer] = session
        event = PeerAttached(peer=peer, server_id=session.server_id, epoch=session.epoch)
        return [event], [answer]

    def _follow(self, peer: bytes, session: Session) -> tuple[list[Event], list[Message]]:
        rank = session.follower_rank
        before = [self._followers[rank]] if rank in self._followers else []
        # Its connection may live, and it would wait for orders for ever.
        events, messages = self._send_away(before, "another took its place")
        self._sessions[peer] = session
        self._followers[rank] = peer
        return [*events, FollowerJoined(rank=rank)], messages

    def _answer(self, peer: bytes, message: Challenge | Refusal) -> list[Message]:
        if isinstance(message, Refusal):
            self.num_refused += 1
            logger.warning("refused peer %s: %s", peer.hex(), message.message)
        return [(peer, [codec.encode(message)])]

    def _session(self, peer: bytes, epoch: int) -> Session:
        session = self._sessions.get(peer)
        if session is None or session.follower_rank != -1:
            raise _NotAttached("this came before the handshake; attach first")
        if epoch != session.epoch:
            raise EpochMismatch(
                f"the message carries epoch {epoch}, this session is at {session.epoch}; "
                f"attach again before sending"
            )
        return session

    def _check(self, peer: bytes, header: Dispatch, frames: Sequence[Frame]) -> Exchange:
        self._session(peer, header.epoch)
        if not 0 <= header.micro_batch_id < header.num_micro_batches <= MAX_MICRO_BATCHES:
            raise ProtocolError(
                f"micro-batch {header.micro_batch_id} of {header.num_micro_batches} is out of "
                f"range; an attention server has slots 0 to {MAX_MICRO_BATCHES - 1}"
            )
        if (peer, header.micro_batch_id) in self._occupied:
            raise ProtocolError(
                f"slot {header.micro_batch_id} already has an exchange in flight; "
                f"wait for its reply"
            )
        if self._gate.identity.door:
            raise ProtocolError(
                "rows came over ZeroMQ to a server that reads them from slots on the GPU; start "
                "both roles with the same --afd-transport"
            )
        spec = self._spec
        if header.layer_id not in self._layers:
            raise ProtocolError(
                f"layer {header.layer_id} has no experts here; "
                f"MoE layers are {spec.moe_layer_ids[0]} to {spec.moe_layer_ids[-1]}"
            )
        if not 1 <= header.num_rows <= spec.max_rows:
            raise CapacityError(
                f"{header.num_rows} rows in one exchange; 1 to {spec.max_rows} were agreed"
            )
        if len(frames) != 2:
            raise ProtocolError(f"a dispatch has 2 frames, got {len(frames)}")
        rows = unpack_rows(frames[1], header.num_rows, spec.hidden_size, spec.top_k, self._dtype)
        lowest, highest = (int(bound) for bound in torch.aminmax(rows.topk_ids))
        if lowest < -1 or highest >= spec.num_experts:
            raise ProtocolError(
                f"topk_ids between {lowest} and {highest}; the model has experts 0 to "
                f"{spec.num_experts - 1}, and -1 for none"
            )
        return Exchange(peer=peer, header=header, rows=rows)


class _NotAttached(ProtocolError):
    pass


def _code_of(error: AfdError) -> RefusalCode:
    match error:
        case _NotAttached():
            return RefusalCode.NOT_ATTACHED
        case EpochMismatch():
            return RefusalCode.EPOCH
        case CapacityError():
            return RefusalCode.CAPACITY
        case _:
            return RefusalCode.PROTOCOL
