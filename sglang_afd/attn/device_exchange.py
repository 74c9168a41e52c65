"""Rows on the GPU: kernels of the step put them into slots that MLP ranks reach, and wait there.

Nothing here copies to the host, so the same calls run eagerly and while a CUDA graph is captured;
the graph then holds addresses of this server's own slots only. The host waits for the GPU only
where an eager step is many layers ahead of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang_afd.attn.attach import Attacher
from sglang_afd.attn.exchange import Step, StepExchange, kind_of
from sglang_afd.attn.launch_limit import LaunchLimit
from sglang_afd.attn.micro_batch import MicroBatch
from sglang_afd.attn.stall_guard import StallGuard
from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.base import Rows
from sglang_afd.transport.cuda_ipc.layout import EVERY_ROW


class SlabSide(Protocol):
    """What a step does with a `Slab`, in the order of torch's current stream."""

    def stage_step(self, *, step: int, kind: Kind, num_micro_batches: int, num_rows: int) -> None:
        """See `Slab`."""

    def dispatch(
        self,
        slot: int,
        layer_id: int,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        first_row: int = 0,
        rings: bool,
    ) -> None:
        """See `Slab`."""

    def combine(self, slot: int, num_rows: int) -> Tensor:
        """See `Slab`."""


class DeviceExchange(StepExchange):
    """A step is launched, and goes on by itself.

    Args:
        attacher: Its links have opened `slab` to the MLP ranks.
        guard: Ends what waits for too long.
        slab: This server's slots.
        max_rows: Of one exchange.
        slab_bytes: What the slots take on the GPU.
        is_capturing: Does the current stream capture a graph?
        limit: Of eager steps.
    """

    runs_ahead = True

    def __init__(
        self,
        attacher: Attacher[Any],
        guard: StallGuard[Any],
        slab: SlabSide,
        *,
        max_rows: int,
        slab_bytes: int = 0,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        limit: LaunchLimit | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.slab_bytes = slab_bytes
        self._attacher = attacher
        self._guard = guard
        self._slab = slab
        self._is_capturing = is_capturing
        self._limit = limit or LaunchLimit()
        self._step_number = 0

    def start(self) -> None:
        """See `StepExchange`: not before, so that no thread touches the GPU during a capture."""
        self._attacher.start()
        self._guard.start()

    def begin(self, step: Step) -> None:
        """See `StepExchange`: nothing is launched while nobody would answer."""
        self._guard.check()
        self._step_number = step.number
        self._attacher.take(waiting_since_s=time.monotonic(), limit_s=step.deadline_s)

    def end(self) -> None:
        """See `StepExchange`; what was launched goes on."""

    def stage(self, kind: Kind, *, number: int, num_rows: int | None, most_rows: int) -> None:
        """See `StepExchange`."""
        self._slab.stage_step(
            step=self._step_number,
            kind=kind_of(kind, most_rows, self.max_rows),
            num_micro_batches=number,
            num_rows=EVERY_ROW if num_rows is None else num_rows,
        )

    def send(
        self, layer_id: int, micro_batch: MicroBatch, rows: Rows, *, first_row: int, is_whole: bool
    ) -> None:
        """See `StepExchange`."""
        self._slab.dispatch(
            micro_batch.id,
            layer_id,
            rows.hidden_states,
            rows.topk_ids,
            rows.topk_weights,
            first_row=micro_batch.first_row + first_row,
            # Later layers are mostly foreseen. A rank that was attached in the middle of a step, or
            # that forms no rounds, does not know of them otherwise.
            rings=True,
        )

    def receive(self, micro_batch: MicroBatch, num_rows: int, *, is_whole: bool) -> Tensor:
        """See `StepExchange`."""
        total = self._slab.combine(micro_batch.id, num_rows)
        if self._is_capturing():
            # In a graph the next dispatch of the slot comes after whatever reads this.
            return total if is_whole else total.clone()
        total = total.clone()
        self._limit.launched()
        return total

    def launched(self) -> None:
        """See `StepExchange`."""
        self._guard.launched()

    def finished(self) -> None:
        """See `StepExchange`."""
        self._guard.finished()

    def check(self) -> None:
        """See `StepExchange`."""
        self._guard.check()

    def give_up(self, reason: str) -> None:
        """See `StepExchange`."""
        self._guard.give_up(reason)

    def close(self) -> None:
        """See `StepExchange`."""
        self._guard.close()
