"""Runs the micro-batches of a step in turns: each in a greenlet, all in the scheduler's thread.

A micro-batch runs until it has sent its rows of a layer, then the next one does: A.attention,
A.send, B.attention, B.send, A.wait, A.attention and so on. In every layer the attention of an
earlier micro-batch comes first, so a later one may attend to what it wrote.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from sglang_afd.upstream import forward_state
from sglang_afd.upstream.forward_state import ForwardState, ThreadState

logger = logging.getLogger(__name__)

_running: _Track | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What a dispatcher must know of the slice that it sends for."""

    id: int  # 0 .. number - 1
    number: int  # of micro-batches of this step, all with rows
    most_rows: int  # of the step's largest micro-batch
    first_row: int = 0  # of its rows in the step, with the padding before it


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """One micro-batch as `run_in_turns` is given it."""

    num_rows: int  # at least 1
    forward: Callable[[], Any]
    context: forward_state.ForwardContext | None  # with this micro-batch's attention backend
    first_row: int = 0  # in the step, as `MicroBatch` has it


def current(num_rows: int) -> MicroBatch:
    """The micro-batch that runs now; a whole step of `num_rows` outside `run_in_turns`."""
    if _running is None:
        return MicroBatch(id=0, number=1, most_rows=num_rows)
    return _running.micro_batch


def let_others_run() -> None:
    """Called between dispatch and combine; returns when it is this micro-batch's turn again."""
    if _running is not None:
        _running.pause()


def run_in_turns(slices: Sequence[Slice]) -> list[Any]:
    """Run every slice's forward and return their results in order.

    An exception in one ends the others where they are paused, with their `finally` blocks, and then
    goes on to the caller. Whatever happens, SGLang's globals are as they were before.
    """
    before = forward_state.capture()
    most_rows = max(part.num_rows for part in slices)
    tracks = [
        _Track(
            MicroBatch(id=index, number=len(slices), most_rows=most_rows, first_row=part.first_row),
            part.forward,
            replace(before, context=part.context),
        )
        for index, part in enumerate(slices)
    ]
    try:
        while waiting := [track for track in tracks if not track.is_done]:
            for track in waiting:
                track.resume()
    finally:
        for track in tracks:
            track.abandon()
        forward_state.restore(before)
    return [track.result for track in tracks]


class _Track:
    """One micro-batch's greenlet and the globals that it runs with."""

    def __init__(
        self, micro_batch: MicroBatch, forward: Callable[[], Any], state: ForwardState
    ) -> None:
        self.micro_batch = micro_batch
        self.result: Any = None
        self._state = state
        self._thread = ThreadState.now()
        self._greenlet = greenlet(forward)
        self._greenlet.gr_context = contextvars.copy_context()

    @property
    def is_done(self) -> bool:
        return bool(self._greenlet.dead)

    def resume(self) -> None:
        """Run until it pauses, ends or raises."""
        self._enter(self._greenlet.switch)

    def pause(self) -> None:
        """Called in the greenlet: give the turn back."""
        if getcurrent() is not self._greenlet or self._greenlet.parent is None:
            raise AssertionError("a MoE layer of one micro-batch ran in another's greenlet")
        if (now := ThreadState.now()) != self._thread:
            raise AssertionError(
                f"micro-batch {self.micro_batch.id} holds {now} across an exchange; the step has "
                f"{self._thread}, and the other micro-batches would inherit it"
            )
        self._greenlet.parent.switch()

    def abandon(self) -> None:
        """End a greenlet that another one's exception has left paused."""
        if self.is_done:
            return
        try:
            self._enter(lambda: self._greenlet.throw(GreenletExit))
        except Exception:
            logger.exception("while micro-batch %d was ended", self.micro_batch.id)

    def _enter(self, switch: Callable[[], Any]) -> None:
        global _running
        forward_state.restore(self._state)
        _running = self
        try:
            self.result = switch()
        finally:
            _running = None
            self._state = forward_state.capture()
