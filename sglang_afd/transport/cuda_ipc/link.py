"""The attention side on the GPUs of one host: ZeroMQ to agree and to watch, a slab for the rows."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_afd.errors import CapacityError, ConfigError, ExchangeFailed, PeerLost, Refused
from sglang_afd.protocol.messages import (
    Attached,
    Dispatch,
    OpenSlots,
    RefusalCode,
    StepIntent,
    Withdrawal,
)
from sglang_afd.transport.base import Link, Rows
from sglang_afd.transport.cuda_ipc.door import bring
from sglang_afd.transport.cuda_ipc.layout import EVERY_ROW, SlabShape
from sglang_afd.transport.cuda_ipc.slab import Slab
from sglang_afd.transport.cuda_ipc.streams import own_stream
from sglang_afd.transport.zmq_link import LinkOptions, ZmqLink

HEAR_S = 0.02  # between two looks at what ranks say unasked
ABORT_AGAIN_S = 0.01  # see `Slab.abort`
SPIN_S = 0.0005  # of a wait; an exchange takes some 10 microseconds beside the experts


class CudaIpcLink(Link):
    """Attached when the constructor returns: every rank has mapped the slab, and its link is open.

    The slab outlives the link and belongs to the caller; an attention server's kernels use it
    directly. `dispatch` and `combine` are for whoever wants one exchange at a time.

    Args:
        addresses: The exchange address of every MLP rank, rank 0 first.
        options: How to attach; `options.spec` is what the slab was laid out for.
        slab: The slots.

    Raises:
        Refused: A rank declined, and why.
        PeerLost: A rank did not answer.
        ConfigError: The ranks do not cover every expert once, or are too many for the slab.
    """

    def __init__(self, addresses: Sequence[str], options: LinkOptions, slab: Slab) -> None:
        check_room(len(addresses), slab.shape)
        self._options = options
        self._slab = slab
        self._in_flight: dict[int, tuple[Dispatch, Rows]] = {}  # by slot
        self._failure: ExchangeFailed | None = None
        self._sockets_lock = threading.Lock()  # two threads use the control sockets, in turns
        self._control = ZmqLink(addresses, options)
        self.ranks = self._control.ranks
        self.epoch = self._control.epoch
        try:
            for answer in self.ranks:
                self._bring_slots(answer)
            slab.attach(self.epoch, len(self.ranks))
        except BaseException:
            self.close()
            self.close_watch()
            raise

    @property
    def lost(self) -> str | None:
        """See `Link`."""
        return self._control.lost

    def mark_lost(self, reason: str) -> None:
        """See `Link`; callable from any thread."""
        self._control.mark_lost(reason)

    def raise_if_lost(self) -> None:
        """See `Link`; ExchangeFailed where the experts could not run on our rows."""
        if self.lost is None:
            return
        with self._sockets_lock:  # whoever heard of the loss has then said what it is
            failure = self._failure
        if failure is not None:
            raise failure
        super().raise_if_lost()

    def announce(self, message: StepIntent | Withdrawal) -> None:
        """See `Link`."""
        with self._sockets_lock:
            self._control.announce(message)

    def watch(self, timeout_s: float) -> bool:
        """Look for ranks that went away or sent us away; see `ZmqLink.watch`."""
        deadline_s = time.monotonic() + timeout_s
        while self._control.watch(max(0.0, min(HEAR_S, deadline_s - time.monotonic()))):
            self._hear()
            if time.monotonic() >= deadline_s:
                return self.lost is None
        return False

    @property
    def is_closed(self) -> bool:
        """Has `close` returned?"""
        return self._control.is_closed

    def close_watch(self) -> None:
        """See `ZmqLink.close_watch`."""
        self._control.close_watch()

    def close(self) -> None:
        """See `Link`; the slab stays as it is."""
        with self._sockets_lock:
            self._control.close()

    def dispatch(self, header: Dispatch, rows: Rows) -> None:
        """See `Link`; on a stream of the link, after what torch's current stream has to do."""
        self.raise_if_lost()
        self._check(header, rows)
        self._in_flight[header.micro_batch_id] = header, rows
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._slab.stage_step(
                step=header.step,
                kind=header.kind,
                num_micro_batches=header.num_micro_batches,
                num_rows=EVERY_ROW,
            )
            self._slab.dispatch(
                header.micro_batch_id,
                header.layer_id,
                rows.hidden_states,
                rows.topk_ids,
                rows.topk_weights,
                rings=True,
            )

    def combine(self, micro_batch_id: int, *, limit_s: float = math.inf) -> Tensor:
        """See `Link`; the sum is there when this returns, for any stream."""
        header, _ = self._in_flight[micro_batch_id]
        stream, done = self._stream, torch.cuda.Event()
        with torch.cuda.stream(stream):
            total = self._slab.combine(micro_batch_id, header.num_rows).clone()
            done.record(stream)
        total.record_stream(torch.cuda.current_stream(stream.device))
        try:
            self._wait(done, micro_batch_id, limit_s)
        except PeerLost:
            self._slab.abort()
            while not done.query():
                time.sleep(ABORT_AGAIN_S)
                self._slab.abort()
            raise
        del self._in_flight[micro_batch_id]
        return total

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return own_stream(self._slab.device)

    def _wait(self, done: torch.cuda.Event, slot: int, limit_s: float) -> None:
        started_s = time.monotonic()
        deadline_s = started_s + self._options.stall_timeout_s
        in_time = f"within --afd-stall-timeout {self._options.stall_timeout_s:g} s"
        if limit_s < deadline_s:
            deadline_s, in_time = limit_s, "in the time that its step had left"
        while not done.query():
            now_s = time.monotonic()
            if now_s - started_s < SPIN_S:
                continue
            self._hear()
            if now_s >= deadline_s:
                num_missing = len(self.ranks) - self._slab.num_replied(slot)
                self.mark_lost(
                    f"{num_missing} of {len(self.ranks)} MLP ranks did not reply {in_time}"
                )
            self.raise_if_lost()
            time.sleep(0.0001)

    def _hear(self) -> None:
        with self._sockets_lock:
            try:
                self._control.hear()
            except ExchangeFailed as error:
                self._failure = error
            except PeerLost:
                pass  # `lost` says it

    def _check(self, header: Dispatch, rows: Rows) -> None:
        shape = self._slab.shape
        if header.epoch != self.epoch:
            self.mark_lost(
                f"the message carries epoch {header.epoch}, this session is at {self.epoch}; "
                f"attach again before sending"
            )
            self.raise_if_lost()
        if header.micro_batch_id in self._in_flight:
            raise AssertionError(f"slot {header.micro_batch_id} already has an exchange in flight")
        if not 1 <= header.num_rows <= shape.max_rows:
            raise CapacityError(
                f"{header.num_rows} rows in one exchange; 1 to {shape.max_rows} fit, "
                f"see --afd-max-rows"
            )
        if header.num_rows != rows.hidden_states.shape[0]:
            raise AssertionError(
                f"{rows.hidden_states.shape[0]} rows came under a header of {header.num_rows}"
            )

    def _bring_slots(self, answer: Attached) -> None:
        if not answer.door:
            raise Refused(
                RefusalCode.MODEL,
                f"MLP rank {answer.rank} takes rows over ZeroMQ, this attention server has slots "
                f"on its GPU; start both with the same --afd-transport",
            )
        message = open_slots(self._options.server_id, self.epoch, self._slab.shape)
        bring(answer.door, message, self._slab.fds, timeout_s=self._options.handshake_timeout_s)


def check_room(num_ranks: int, shape: SlabShape) -> None:
    """Have the slots room for the replies of so many ranks?

    Raises:
        ConfigError: They have not.
    """
    if num_ranks > shape.max_ranks:
        raise ConfigError(
            f"the group has {num_ranks} MLP ranks, the slots of this attention server were laid "
            f"out for {shape.max_ranks}; restart it with --afd-max-mlp-ranks {num_ranks}"
        )


def open_slots(server_id: str, epoch: int, shape: SlabShape) -> OpenSlots:
    """What an MLP rank must know to map slots of this shape."""
    return OpenSlots(
        server_id=server_id,
        epoch=epoch,
        num_slots=shape.num_slots,
        max_ranks=shape.max_ranks,
        max_rows=shape.max_rows,
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        dtype=shape.dtype,
        is_fp8=shape.is_fp8,
    )
