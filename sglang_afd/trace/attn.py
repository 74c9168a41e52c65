"""The attention role's timeline: each step, and per micro-batch attention, dispatch, wait, combine.

One thread runs all micro-batches of a step in turn, so a micro-batch's attention begins where that
thread last finished something else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from sglang_afd.protocol.messages import MAX_MICRO_BATCHES, Dispatch, Kind
from sglang_afd.trace.file import place_of
from sglang_afd.trace.header import header_of_this_process
from sglang_afd.trace.recorder import Recorder

STEPS = 0  # track of the steps
MICRO_BATCH_0 = 1  # the other micro-batches follow
SHORTEST_STALL_NS = 1_000_000


class AttnTimeline:
    """Called by the scheduler's thread, with times of `time.monotonic_ns()`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._step = 0
        self._kind = ""
        self._step_began_ns = 0
        self._free_since_ns = 0  # when the thread last finished something that is on a track
        self._layers: dict[int, int] = {}  # of each micro-batch, the one under way
        self._epoch = 0
        self._stalled_from_ns = 0  # until the next dispatch; 0 without a stall
        recorder.name_track(STEPS, "steps")
        for micro_batch_id in range(MAX_MICRO_BATCHES):
            recorder.name_track(MICRO_BATCH_0 + micro_batch_id, f"micro-batch {micro_batch_id}")

    def step_begins(self, number: int, kind: Kind) -> None:
        """A forward begins."""
        self._step, self._kind = number, kind.value
        self._step_began_ns = self._free_since_ns = time.monotonic_ns()
        self._layers.clear()

    def step_ends(self) -> None:
        """It is over; what the last combine left to do (norm, LM head, sampling) is its `head`."""
        now_ns = time.monotonic_ns()
        self._recorder.span(
            f"step {self._step} ({self._kind})",
            STEPS,
            self._step_began_ns,
            now_ns,
            step=self._step,
            kind=self._kind,
            micro_batches=len(self._layers),
        )
        if self._layers:
            self._recorder.span("head", STEPS, self._free_since_ns, now_ns, step=self._step)

    def dispatched(self, header: Dispatch, started_ns: int) -> None:
        """Rows are on their way; sending them began at `started_ns`."""
        now_ns = time.monotonic_ns()
        micro_batch_id, layer_id = header.micro_batch_id, header.layer_id
        track = MICRO_BATCH_0 + micro_batch_id
        if self._layers.get(micro_batch_id) != layer_id:  # else one more piece of the same rows
            self._layers[micro_batch_id] = layer_id
            until_ns = self._stalled_from_ns or started_ns
            self._recorder.span(
                "attention",
                track,
                self._free_since_ns,
                max(until_ns, self._free_since_ns),
                step=self._step,
                layer=layer_id,
            )
        self._stalled_from_ns = 0
        self._recorder.span(
            "dispatch",
            track,
            started_ns,
            now_ns,
            step=self._step,
            layer=layer_id,
            micro_batch=micro_batch_id,
            rows=header.num_rows,
            kind=header.kind.value,
            epoch=str(header.epoch),
        )
        self._free_since_ns = now_ns

    def combined(
        self, micro_batch_id: int, started_ns: int, epoch: int, received_ns: Mapping[int, int]
    ) -> None:
        """The sum is there; the wait for it began at `started_ns`.

        Args:
            micro_batch_id: Whose.
            started_ns: When combine was called.
            epoch: Of the replies.
            received_ns: When each rank's reply had been read.
        """
        now_ns = time.monotonic_ns()
        track, layer_id = MICRO_BATCH_0 + micro_batch_id, self._layers.get(micro_batch_id, -1)
        whole_ns = min(max(started_ns, *received_ns.values()), now_ns)
        since_begin_us = self._recorder.since_begin_us
        self._recorder.span("wait", track, started_ns, whole_ns, step=self._step, layer=layer_id)
        self._recorder.span(
            "combine",
            track,
            whole_ns,
            now_ns,
            step=self._step,
            layer=layer_id,
            micro_batch=micro_batch_id,
            epoch=str(epoch),
            received_us={str(rank): since_begin_us(at) for rank, at in received_ns.items()},
        )
        self._free_since_ns = now_ns

    def taken(self, epoch: int, started_ns: int) -> None:
        """There are MLP servers, which were asked for at `started_ns`; if not at once, a stall."""
        now_ns = time.monotonic_ns()
        if now_ns - started_ns >= SHORTEST_STALL_NS:
            self._recorder.span("stall", STEPS, started_ns, now_ns, step=self._step)
            self._stalled_from_ns = started_ns
        if epoch != self._epoch:
            self._epoch = epoch
            self._recorder.instant("attached", STEPS, now_ns, epoch=str(epoch))


def begin(file: str, server_id: str) -> AttnTimeline | None:
    """The timeline of `--afd-trace FILE`, or None where none is wanted.

    Raises:
        ConfigError: The file cannot be written.
    """
    if not file:
        return None
    header = header_of_this_process("attn", server_id)
    return AttnTimeline(Recorder(place_of(file, server_id), header))
