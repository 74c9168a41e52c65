from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from sglang_afd.attn.step_timer import HostTimer, StreamTimer
from sglang_afd.rounds.choice import Fixed, Measured


class Choice(Measured):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int, bool, float]] = []

    def observe(self, num_rows: int, number: int, duration_s: float, *, is_prefill: bool) -> None:
        self.told.append((num_rows, number, is_prefill, duration_s))


class Event:
    """Of a stream that reaches it when the test says so."""

    made: deque[Event] = deque()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.is_reached = False
        self.is_recorded = False
        Event.made.append(self)

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        assert self.is_recorded
        return self.is_reached

    def elapsed_time(self, other: Event) -> float:
        assert self.is_recorded
        return 20.0


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> deque[Event]:
    Event.made.clear()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event.made


def test_a_forward_that_is_over_when_it_returns_is_told_at_once() -> None:
    choice = Choice()

    with HostTimer(choice).time(8, 2, is_prefill=True):
        pass

    [(num_rows, number, is_prefill, duration_s)] = choice.told
    assert (num_rows, number, is_prefill) == (8, 2, True)
    assert duration_s >= 0


def test_a_forward_that_goes_on_by_itself_is_told_when_its_stream_has_reached_its_end(
    events: deque[Event],
) -> None:
    choice = Choice()
    timer = StreamTimer(choice)
    with timer.time(8, 2, is_prefill=False):
        pass
    with timer.time(9, 1, is_prefill=False):
        pass
    assert choice.told == []

    events[1].is_reached = True
    with timer.time(10, 1, is_prefill=False):
        pass

    assert choice.told == [(8, 2, False, 0.02)]


def test_a_forward_that_raised_is_not_told(events: deque[Event]) -> None:
    choice: Any = Choice()
    timer = StreamTimer(choice)

    with pytest.raises(ValueError, match="planted"), timer.time(8, 2, is_prefill=False):
        raise ValueError("planted")

    assert not timer._running


def test_a_number_that_is_fixed_costs_no_events(events: deque[Event]) -> None:
    with StreamTimer(Fixed(2)).time(8, 2, is_prefill=False):
        pass

    assert not events
