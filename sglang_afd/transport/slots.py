"""The attention side of a transport without its sockets: what is in flight in each slot."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch import Tensor

from sglang_afd.errors import CapacityError, ExchangeFailed, PeerLost, ProtocolError
from sglang_afd.protocol import codec
from sglang_afd.protocol.messages import (
    Attached,
    Challenge,
    Combine,
    Dispatch,
    Failed,
    ModelSpec,
    Refusal,
    RefusalCode,
)
from sglang_afd.transport.base import Rows
from sglang_afd.transport.frames import from_frame, pack_rows
from sglang_afd.transport.sessions import WIRE_DTYPES, Frame


@dataclass(kw_only=True, slots=True)
class _InFlight:
    header: Dispatch
    frames: list[Frame]  # kept until every rank has replied
    partials: dict[int, Tensor] = field(default_factory=dict)  # by rank
    received_ns: dict[int, int] = field(default_factory=dict)  # by rank, time.monotonic_ns()


class Slots:
    """Every exchange in flight, by micro-batch; knows nothing of sockets."""

    def __init__(self, spec: ModelSpec, num_ranks: int) -> None:
        self._spec = spec
        self._dtype = WIRE_DTYPES[spec.dtype]
        self._num_ranks = num_ranks
        self._in_flight: dict[int, _InFlight] = {}
        self.received_ns: dict[int, int] = {}  # of what was taken last, by rank

    def put(self, header: Dispatch, rows: Rows) -> list[Frame]:
        """Occupy the slot of `header.micro_batch_id`; returns the frames for every rank."""
        if header.micro_batch_id in self._in_flight:
            raise AssertionError(f"slot {header.micro_batch_id} already has an exchange in flight")
        if not 1 <= header.num_rows <= self._spec.max_rows:
            raise CapacityError(
                f"{header.num_rows} rows in one exchange; 1 to {self._spec.max_rows} fit, "
                f"see --afd-max-rows"
            )
        if rows.hidden_states.dtype != self._dtype:
            raise AssertionError(
                f"hidden_states are {rows.hidden_states.dtype}, the handshake agreed on "
                f"{self._dtype}"
            )
        frames: list[Frame] = [
            codec.encode(header),
            pack_rows(rows),
        ]
        self._in_flight[header.micro_batch_id] = _InFlight(header=header, frames=frames)
        return frames

    def receive(self, rank: int, frames: list[Frame]) -> None:
        """Take one multipart message of `rank`.

        Raises:
            ExchangeFailed: The rank has no result for the exchange, nor would have the next time.
            PeerLost: The rank does not know us under this epoch.
            ProtocolError: The message is not a reply to what is in flight.
        """
        message = codec.decode_to_attn(frames[0])
        match message:
            case Combine():
                self._fill(rank, message, frames)
            case Failed():
                raise ExchangeFailed(f"MLP rank {rank} declined an exchange: {message.message}")
            case Refusal(code=RefusalCode.EPOCH | RefusalCode.NOT_ATTACHED):
                raise PeerLost(f"MLP rank {rank} knows us no longer: {message.message}")
            case Refusal():
                raise ExchangeFailed(f"MLP rank {rank} refused an exchange: {message.message}")
            case Attached() | Challenge():
                raise ProtocolError(f"MLP rank {rank} sent a second {type(message).__name__}")
            case _:
                assert_never(message)

    def is_whole(self, micro_batch_id: int) -> bool:
        """Has every rank replied to the exchange in this slot?"""
        return len(self._in_flight[micro_batch_id].partials) == self._num_ranks

    def missing(self, micro_batch_id: int) -> list[int]:
        """The ranks that have not replied yet."""
        partials = self._in_flight[micro_batch_id].partials
        return [rank for rank in range(self._num_ranks) if rank not in partials]

    def take(self, micro_batch_id: int) -> Tensor:
        """Free the slot and add the partial sums in rank order, in float32 beyond one rank."""
        taken = self._in_flight.pop(micro_batch_id)
        partials, self.received_ns = taken.partials, taken.received_ns
        first = partials[0]
        if self._num_ranks == 1:
            return first
        total = first.to(torch.float32, copy=True)
        for rank in range(1, self._num_ranks):
            total += partials[rank]
        return total.to(self._dtype)

    def _fill(self, rank: int, combine: Combine, frames: list[Frame]) -> None:
        pending = self._in_flight.get(combine.micro_batch_id)
        wanted = pending and _address(pending.header)
        if pending is None or _address(combine) != wanted:
            raise ProtocolError(
                f"MLP rank {rank} replied to epoch, step, layer, micro-batch, rows "
                f"{_address(combine)}; in flight is {wanted}"
            )
        if rank in pending.partials or len(frames) != 2:
            raise ProtocolError(f"MLP rank {rank} sent a second or broken reply to {wanted}")
        shape = (combine.num_rows, self._spec.hidden_size)
        pending.partials[rank] = from_frame(frames[1], shape, self._dtype, "partial sum")
        pending.received_ns[rank] = time.monotonic_ns()


def _address(message: Dispatch | Combine) -> tuple[int, int, int, int, int]:
    return (
        message.epoch,
        message.step,
        message.layer_id,
        message.micro_batch_id,
        message.num_rows,
    )
