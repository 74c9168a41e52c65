"""Rows through host memory: each exchange is kept, and sent again when its peers were lost."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from sglang_afd.attn.attach import Attacher
from sglang_afd.attn.exchange import Step, StepExchange, kind_of
from sglang_afd.attn.micro_batch import MicroBatch
from sglang_afd.config import MAX_STEP_SHARE
from sglang_afd.errors import ExchangeFailed, PeerLost, StallTimeout
from sglang_afd.protocol.messages import Dispatch, Kind
from sglang_afd.trace.attn import AttnTimeline
from sglang_afd.transport.base import Rows
from sglang_afd.transport.zmq_link import ZmqLink


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """An exchange whose sum is not there yet; it is sent again when the MLP servers were lost."""

    layer_id: int
    micro_batch: MicroBatch
    rows: Rows  # in host memory


class HostExchange(StepExchange):
    """Sends and waits in the scheduler's thread, so a step is over when it was launched."""

    runs_ahead = False

    def __init__(
        self, attacher: Attacher[ZmqLink], max_rows: int, timeline: AttnTimeline | None = None
    ) -> None:
        self.max_rows = max_rows
        self._attacher = attacher
        self._timeline = timeline
        self._link: ZmqLink | None = None  # of the running step; taken when it first sends
        self._pending: dict[int, _Pending] = {}  # by micro-batch
        self._step = Step(number=0, kind=Kind.DECODE, deadline_s=float("inf"))

    def start(self) -> None:
        """See `StepExchange`: the attaching thread runs since the model was loaded."""

    def begin(self, step: Step) -> None:
        """See `StepExchange`; the link is taken when rows are sent first."""
        self._step = step

    def end(self) -> None:
        """See `StepExchange`."""
        if self._pending and self._link is not None:
            reason = f"step {self._step.number} was given up with exchanges in flight"
            self._link.mark_lost(reason)
        self._pending.clear()
        self._link = None

    def stage(self, kind: Kind, *, number: int, num_rows: int | None, most_rows: int) -> None:
        """See `StepExchange`: each exchange says it all."""

    def launched(self) -> None:
        """See `StepExchange`."""

    def finished(self) -> None:
        """See `StepExchange`: a step that was given up has raised already."""

    def check(self) -> None:
        """See `StepExchange`: an error has been raised already."""

    def give_up(self, reason: str) -> None:
        """See `StepExchange`: none is under way."""

    def close(self) -> None:
        """See `StepExchange`."""

    def send(
        self, layer_id: int, micro_batch: MicroBatch, rows: Rows, *, first_row: int, is_whole: bool
    ) -> None:
        """See `StepExchange`; waits only while no MLP servers are attached.

        Raises:
            StallTimeout: They did not come back in time.
        """
        self._pending[micro_batch.id] = _Pending(
            layer_id=layer_id, micro_batch=micro_batch, rows=_in_host_memory(rows)
        )
        if self._link is None:
            self._send_pending(time.monotonic())
            return
        try:
            self._dispatch(self._link, micro_batch.id)
        except PeerLost:
            self._send_pending(time.monotonic())

    def receive(self, micro_batch: MicroBatch, num_rows: int, *, is_whole: bool) -> Tensor:
        """See `StepExchange`; whichever MLP servers add it up. In host memory.

        Raises:
            ExchangeFailed: The experts raised on these rows.
            StallTimeout: The MLP servers were lost, and did not come back in time.
        """
        waiting_since_s = time.monotonic()
        started_ns = time.monotonic_ns() if self._timeline is not None else 0
        while True:
            try:
                link = self._link_or_raise()
                total = link.combine(micro_batch.id, limit_s=self._step.deadline_s)
                break
            except ExchangeFailed:
                raise
            except PeerLost:
                self._check_time()
                self._send_pending(waiting_since_s)
                waiting_since_s = time.monotonic()
        del self._pending[micro_batch.id]
        if self._timeline is not None:
            self._timeline.combined(micro_batch.id, started_ns, link.epoch, link.received_ns)
        self._check_time()
        return total

    def _check_time(self) -> None:
        if time.monotonic() >= self._step.deadline_s:
            raise StallTimeout(too_long(self._step.number))

    def _send_pending(self, waiting_since_s: float) -> None:
        """Wait for MLP servers, and send them every exchange that has no sum yet."""
        started_ns = time.monotonic_ns() if self._timeline is not None else 0
        while True:
            link = self._attacher.take(
                waiting_since_s=waiting_since_s, limit_s=self._step.deadline_s
            )
            if self._timeline is not None:
                self._timeline.taken(link.epoch, started_ns)
            try:
                for micro_batch_id in self._pending:
                    self._dispatch(link, micro_batch_id)
            except PeerLost:
                continue
            self._link = link
            return

    def _dispatch(self, link: ZmqLink, micro_batch_id: int) -> None:
        pending = self._pending[micro_batch_id]
        header = Dispatch(
            epoch=link.epoch,
            step=self._step.number,
            layer_id=pending.layer_id,
            micro_batch_id=micro_batch_id,
            num_rows=pending.rows.hidden_states.shape[0],
            kind=kind_of(self._step.kind, pending.micro_batch.most_rows, self.max_rows),
            num_micro_batches=pending.micro_batch.number,
        )
        started_ns = time.monotonic_ns() if self._timeline is not None else 0
        link.dispatch(header, pending.rows)
        if self._timeline is not None:
            self._timeline.dispatched(header, started_ns)

    def _link_or_raise(self) -> ZmqLink:
        if self._link is None:
            raise AssertionError("a sum was waited for that was never dispatched in this step")
        return self._link


def too_long(step: int) -> str:
    """Why a step ends that SGLang's watchdog would end otherwise."""
    return (
        f"step {step} took longer than {MAX_STEP_SHARE:.0%} of --watchdog-timeout, after which "
        f"SGLang would end this server"
    )


def _in_host_memory(rows: Rows) -> Rows:
    return Rows(
        hidden_states=rows.hidden_states.cpu(),
        topk_ids=rows.topk_ids.cpu(),
        topk_weights=rows.topk_weights.cpu(),
    )
