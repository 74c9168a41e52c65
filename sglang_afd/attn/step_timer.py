"""How long a step's forward takes, for the choice of its number of micro-batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_afd.rounds.choice import Fixed, Measured


class StepTimer(Protocol):
    """Around a forward."""

    def time(self, num_rows: int, number: int, *, is_prefill: bool) -> AbstractContextManager[None]:
        """Around a forward of `num_rows` rows in `number` micro-batches."""


class HostTimer:
    """For forwards that are over when they return."""

    def __init__(self, choice: Fixed | Measured) -> None:
        self._choice = choice

    @contextmanager
    def time(self, num_rows: int, number: int, *, is_prefill: bool) -> Iterator[None]:
        """See `StepTimer`."""
        started_s = time.perf_counter()
        yield
        duration_s = time.perf_counter() - started_s
        self._choice.observe(num_rows, number, duration_s, is_prefill=is_prefill)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timed:
    num_rows: int
    number: int
    is_prefill: bool
    began: torch.cuda.Event
    ended: torch.cuda.Event


class StreamTimer:
    """For forwards that go on by themselves: measured on their stream, told when they are over."""

    def __init__(self, choice: Fixed | Measured) -> None:
        self._choice = choice
        self._running: deque[_Timed] = deque()
        self._idle: list[torch.cuda.Event] = []  # to be recorded again

    @contextmanager
    def time(self, num_rows: int, number: int, *, is_prefill: bool) -> Iterator[None]:
        """See `StepTimer`."""
        if isinstance(self._choice, Fixed):  # learns nothing
            yield
            return
        self._tell()
        began, ended = self._event(), self._event()
        began.record()
        yield
        ended.record()
        self._running.append(
            _Timed(
                num_rows=num_rows, number=number, is_prefill=is_prefill, began=began, ended=ended
            )
        )

    def _event(self) -> torch.cuda.Event:
        return self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)

    def _tell(self) -> None:
        while self._running and self._running[0].ended.query():
            timed = self._running.popleft()
            duration_s = timed.began.elapsed_time(timed.ended) / 1000
            self._idle += (timed.began, timed.ended)
            self._choice.observe(
                timed.num_rows, timed.number, duration_s, is_prefill=timed.is_prefill
            )
