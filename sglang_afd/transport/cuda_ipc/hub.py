"""The MLP side on the GPUs of one host: ZeroMQ to agree and to watch, slots for the rows."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_afd.config import FP8
from sglang_afd.errors import AfdError, ConfigError, EpochMismatch, ProtocolError
from sglang_afd.protocol.handshake import Gate
from sglang_afd.protocol.messages import (
    Dispatch,
    ModelSpec,
    OpenSlots,
    Refusal,
    RefusalCode,
    RunUnit,
    SlotsOpened,
)
from sglang_afd.transport.base import (
    Event,
    Exchange,
    Hub,
    PeerAttached,
    PeerGone,
    Rows,
)
from sglang_afd.transport.cuda_ipc.door import Door, Visit
from sglang_afd.transport.cuda_ipc.layout import DOORBELL_BYTES, SlabShape, shape_of
from sglang_afd.transport.cuda_ipc.listening import Listener, OpenPeer
from sglang_afd.transport.cuda_ipc.peer_table import PeerTable
from sglang_afd.transport.cuda_ipc.streams import own_stream
from sglang_afd.transport.cuda_ipc.unit_ring import RING_UNITS, UnitMemberRef
from sglang_afd.transport.cuda_ipc.units import UnitExchange
from sglang_afd.transport.zmq_follower import ZmqFollower
from sglang_afd.transport.zmq_hub import ZmqHub

logger = logging.getLogger(__name__)

CONTROL_S = 0.001  # between two looks at the sockets, in a turn in which no doorbell rang
MOST_CONTROL_S = 0.002  # the same, whatever rang
SPIN_S = 0.010  # awake so long after the last doorbell
UNMAP_S = 5.0  # at the end, for units in flight; what is still mapped goes with the process


@dataclass(frozen=True, kw_only=True, slots=True)
class HubOptions:
    """How one rank listens and where it computes."""

    listen: str  # as `ZmqHub` takes it
    heartbeat_timeout_s: float
    max_peers: int  # attention servers attached at once
    device: int  # CUDA's index of the GPU
    with_rows: bool = True  # `Arrived` shows the rows; a loop that pulls units does without


class CudaIpcHub(Hub):
    """One rank's end: `PeerAttached` is told once the peer's slots are mapped.

    `reply` is for whoever serves one exchange at a time; a loop of units uses `table`,
    `peer_index` and a `UnitExchange` of its own, which it names in `watch_units`.

    Args:
        gate: Who may attach; it is told of the door.
        options: Where and how.
        door: The path of the door; "" makes a directory of mode 0700.
        table: Of the peers; None makes one.
    """

    def __init__(
        self,
        gate: Gate,
        options: HubOptions,
        *,
        door: str = "",
        table: PeerTable | None = None,
    ) -> None:
        spec = gate.identity.spec
        self._identity = gate.identity
        self._listener = Listener(spec.moe_layer_ids, spec.max_rows, self._rows_of)
        self._options = options
        self._waiting: dict[int, PeerAttached] = {}  # by epoch, until their slots come
        self._open: dict[bytes, OpenPeer] = {}
        self._retired: list[tuple[int, list[tuple[UnitExchange, int]]]] = []  # mapped still
        self._watched: list[UnitExchange] = []
        self._told: list[Event] = []  # found while sending, told at the next poll
        self._num_refused = 0
        self._control_due_s = 0.0
        self._rung_at_s = 0.0
        self._is_closed = False
        self._is_following = False
        check_agreement(spec)
        # Those that went stay in the table until nothing in flight names them.
        self.table = table or PeerTable(
            max_peers=2 * options.max_peers,
            rank=gate.identity.rank,
            device=options.device,
        )
        self._door = Door(door)
        gate.open_door(self._door.address)
        try:
            self._control = ZmqHub(
                gate, options.listen, heartbeat_timeout_s=options.heartbeat_timeout_s
            )
        except BaseException:
            self._door.close()
            raise
        self.address = self._control.address
        if options.with_rows:
            # NOTE: before anybody waits, since allocating may itself wait for kernels that do.
            self._units = self._make_units()
            # Of its own, since it may have to wait until a peer is found to be gone.
            self._stream = own_stream(options.device, is_urgent=True)

    @property
    def num_refused(self) -> int:
        """See `Hub`."""
        return self._control.num_refused + self._num_refused

    def peer_index(self, peer: bytes) -> int | None:
        """Where a peer stands in the table; None once it is gone."""
        found = self._open.get(peer)
        return None if found is None else found.index

    def watch_units(self, units: UnitExchange) -> None:
        """Slots of a peer that went stay mapped until these units have left them alone."""
        self._watched.append(units)

    def follow(self, follower: ZmqFollower) -> None:
        """See `ZmqHub.follow`."""
        self._control.follow(follower)
        self._is_following = True

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Hub`; doorbells at every call, sockets each millisecond or while nothing comes."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            events = self._listen(now_s)
            is_awake = now_s - self._rung_at_s < SPIN_S
            if self._is_look_due(now_s, has_rung=bool(events), may_wait=is_awake or timeout_s <= 0):
                events += self._look(0.0)
            if self._told:
                told, self._told = self._told, []
                events = [*told, *events]
            if events or timeout_s <= 0 or (left_s := deadline_s - time.monotonic()) <= 0:
                return events
            if is_awake:
                os.sched_yield()
            else:
                self._told += self._look(min(left_s, CONTROL_S))

    def _is_look_due(self, now_s: float, *, has_rung: bool, may_wait: bool) -> bool:
        """Look at the sockets now? It takes as long as an exchange; only orders cannot wait."""
        if self._is_following:
            return True
        if has_rung:
            return now_s >= self._control_due_s + MOST_CONTROL_S - CONTROL_S
        return now_s >= self._control_due_s or not may_wait

    def reply(self, exchange: Exchange, partial: Tensor) -> None:
        """See `Hub`; on a stream of the hub, after what torch's current stream has to do."""
        found = self._open.get(exchange.peer)
        if found is None:
            return
        header, units, stream = exchange.header, self._units, self._stream
        while units.num_submitted - units.num_done >= RING_UNITS:
            os.sched_yield()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        member = UnitMemberRef(
            peer_index=found.index,
            slot=header.micro_batch_id,
            num_rows=header.num_rows,
        )
        with torch.cuda.stream(stream):
            units.submit(header.layer_id, [member])
            units.pull(header.num_rows)
            units.push(partial, header.num_rows)
        partial.record_stream(stream)

    def decline(self, exchange: Exchange, code: RefusalCode, message: str) -> None:
        """See `Hub`; slots have no place for a failure, so this ends the peer's session, too.

        The attention server hears the message over ZeroMQ, and that it has to attach again.
        """
        self._control.decline(exchange, code, message)
        self._told += self._tell(self._control.dismiss(exchange.peer, message))

    def order(self, unit: RunUnit) -> None:
        """See `Hub`."""
        self._control.order(unit)

    def expel(self, reason: str) -> list[Event]:
        """See `Hub`."""
        return self._tell(self._control.expel(reason))

    def close(self) -> None:
        """See `Hub`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._door.close()
        self._control.close()
        for found in self._open.values():
            self._retire(found)
        self._open.clear()
        deadline_s = time.monotonic() + UNMAP_S
        while self._retired and time.monotonic() < deadline_s:
            self._unmap()

    def _make_units(self) -> UnitExchange:
        spec, identity = self._identity.spec, self._identity
        units = UnitExchange(
            self.table,
            hidden_size=spec.hidden_size,
            top_k=spec.top_k,
            dtype=getattr(torch, spec.dtype),
            first_expert=identity.first_expert,
            stop_expert=identity.stop_expert,
            layer_ids=spec.moe_layer_ids,
            max_unit_rows=spec.max_rows,
        )
        self.watch_units(units)
        return units

    def _look(self, timeout_s: float) -> list[Event]:
        """What happened outside of the slots."""
        events = self._tell(self._control.poll(timeout_s))
        for visit in self._door.take():
            events += self._welcome(visit)
        self._unmap()
        self._control_due_s = time.monotonic() + CONTROL_S
        for units in self._watched:
            if (error := units.error) is not None:
                # Whom it was about is not sure any more: all attach again, with what waits.
                logger.error("MLP rank %d: %s", self._identity.rank, error)
                units.clear_error()
                events += self._tell(self._control.expel(error))
        return events

    def _tell(self, events: Sequence[Event]) -> list[Event]:
        """Hold back who has brought no slots yet, and take leave of those that go."""
        told: list[Event] = []
        for event in events:
            match event:
                case PeerAttached():
                    self._waiting[event.epoch] = event
                case PeerGone(peer=peer):
                    found = self._open.pop(peer, None)
                    if found is not None:
                        self._retire(found)
                        told.append(event)
                    self._waiting = {
                        epoch: waiting
                        for epoch, waiting in self._waiting.items()
                        if waiting.peer != peer
                    }
                case _:
                    told.append(event)
        return told

    def _welcome(self, visit: Visit) -> list[Event]:
        message = visit.message
        try:
            events, attached = self._admit(visit)
        except (AfdError, OSError, ValueError) as error:
            self._num_refused += 1
            code = RefusalCode.EPOCH if isinstance(error, EpochMismatch) else RefusalCode.MODEL
            visit.answer(Refusal(code=code, message=str(error)))
            return []
        visit.answer(SlotsOpened(epoch=message.epoch))
        return [*events, attached]

    def _admit(self, visit: Visit) -> tuple[list[Event], PeerAttached]:
        message = visit.message
        attached = self._waiting.get(message.epoch)
        if attached is None or attached.server_id != message.server_id:
            raise EpochMismatch(
                f"slots of {message.server_id} came under epoch {message.epoch}, which nobody of "
                f"that name attached under; attach again"
            )
        shape = check_shape(message, self._identity.spec)
        page_bytes = os.fstat(visit.fds[1]).st_size
        if page_bytes < DOORBELL_BYTES:
            raise ProtocolError(f"doorbells need {DOORBELL_BYTES} bytes, got {page_bytes}")
        # NOTE: of one server the older session goes first: leaving it writes into the same slots.
        events: list[Event] = []
        for peer, found in list(self._open.items()):
            if found.event.server_id == message.server_id:
                events += self._tell(self._control.dismiss(peer, "it attached anew"))
        index = self.table.open(visit.fds, shape, message.epoch)
        del self._waiting[message.epoch]
        self._open[attached.peer] = OpenPeer(
            index=index,
            event=attached,
            num_slots=shape.num_slots,
            doorbells=self.table.doorbells(index),
        )
        return events, attached

    def _listen(self, now_s: float) -> list[Event]:
        """What arrived in the slots."""
        events: list[Event] = []
        rung = [
            (peer, found, headers)
            for peer, found in self._open.items()
            if (headers := found.doorbells.rung())
        ]
        for peer, found, headers in rung:
            try:
                events += self._listener.arrivals(found, headers)
            except ProtocolError as error:
                self._num_refused += 1
                logger.warning("%s is sent away: %s", found.event.server_id, error)
                events += self._tell(self._control.dismiss(peer, str(error)))
            self._rung_at_s = now_s
        return events

    def _rows_of(self, found: OpenPeer, header: Dispatch) -> Rows:
        if not self._options.with_rows or self._identity.spec.dispatch_dtype == FP8:
            return self._no_rows
        return self.table.rows_of(found.index, header.micro_batch_id, header.num_rows)

    @functools.cached_property
    def _no_rows(self) -> Rows:
        spec = self._identity.spec
        return Rows(
            hidden_states=torch.empty(0, spec.hidden_size, dtype=getattr(torch, spec.dtype)),
            topk_ids=torch.empty(0, spec.top_k, dtype=torch.int32),
            topk_weights=torch.empty(0, spec.top_k),
        )

    def _retire(self, found: OpenPeer) -> None:
        self.table.mark_dead(found.index)
        last = [(units, units.num_submitted) for units in self._watched]
        self._retired.append((found.index, last))

    def _unmap(self) -> None:
        """Close the slots of peers that went, once no unit in flight names them."""
        kept = []
        for index, last in self._retired:
            if all(units.num_done >= ticket for units, ticket in last):
                self.table.close(index)
            else:
                kept.append((index, last))
        self._retired = kept


def check_agreement(spec: ModelSpec) -> None:
    """Could slots be laid out for this model at all?

    Raises:
        ConfigError: They could not.
    """
    try:
        shape_of(spec, num_slots=1, max_ranks=1)
    except ValueError as error:
        raise ConfigError(f"{error}; use --afd-transport zmq") from None


def check_shape(message: OpenSlots, spec: ModelSpec) -> SlabShape:
    """The shape of the slots that a server brings, which must be what the handshake agreed on.

    Raises:
        ConfigError: It is another.
        ValueError: There is no such layout.
    """
    shape = SlabShape(
        num_slots=message.num_slots,
        max_ranks=message.max_ranks,
        max_rows=message.max_rows,
        hidden_size=message.hidden_size,
        top_k=message.top_k,
        dtype=message.dtype,
        is_fp8=message.is_fp8,
    )
    wanted_shape = shape_of(spec, num_slots=shape.num_slots, max_ranks=shape.max_ranks)
    got, wanted = _agreed(shape), _agreed(wanted_shape)
    if got != wanted:
        raise ConfigError(
            f"slots are laid out for rows, hidden size, top-k, dtype, FP8 {got}; the handshake "
            f"agreed on {wanted}"
        )
    return shape


def _agreed(shape: SlabShape) -> tuple[int, int, int, str, bool]:
    return shape.max_rows, shape.hidden_size, shape.top_k, shape.dtype, shape.is_fp8
