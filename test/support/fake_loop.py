"""A clock that only tests move, and the calls that wait for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable


class FakeTimer:
    def __init__(self, due_s: float, call: Callable[[], None]) -> None:
        self.due_s = due_s
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeLoop:
    """As much of an event loop as code with timers needs."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(self.now_s + delay_s, call)
        self._timers.append(timer)
        return timer

    def advance(self, seconds: float = 0.0) -> None:
        """Let time pass, with every call at its time."""
        until_s = self.now_s + seconds
        for _ in itertools.repeat(None, 10_000):
            self._timers = [timer for timer in self._timers if not timer.is_cancelled]
            due = [timer for timer in self._timers if timer.due_s <= until_s]
            if not due:
                self.now_s = until_s
                return
            first = min(due, key=lambda timer: timer.due_s)
            self._timers.remove(first)
            self.now_s = max(self.now_s, first.due_s)
            first.call()
        raise AssertionError(f"the calls until {until_s} s never end")
