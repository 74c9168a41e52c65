"""How much a scheduler has to do, in shared memory: a few words, written at every step."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

IDLE_LOOK_S = 0.1  # an idle scheduler turns much more often, and nothing changes


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLoad:
    """What one scheduler has at one moment."""

    num_running: int
    num_waiting: int
    free_kv_tokens: int  # with those that hold nothing but reusable prefixes


class LoadBoard:
    """Written by the scheduler's thread, read by the HTTP process, word by word."""

    def __init__(self) -> None:
        # Running, waiting, free tokens of the cache, tokens that were generated since the start.
        self._words: Any = get_context("spawn").RawArray(ctypes.c_int64, 4)
        self._idle_from_s = float("-inf")  # when an idle scheduler's load is to be shown again

    def show(self, load: SchedulerLoad, *, is_idle: bool) -> None:
        """Show it until the next one."""
        words = self._words
        words[0], words[1], words[2] = load.num_running, load.num_waiting, load.free_kv_tokens
        self._idle_from_s = time.monotonic() + IDLE_LOOK_S if is_idle else float("-inf")

    def is_stale(self) -> bool:
        """Of an idle scheduler: has it stepped since it was shown, or is that long ago?"""
        return time.monotonic() >= self._idle_from_s

    def count_tokens(self, num_tokens: int) -> None:
        """A step that generates so many was launched."""
        self._words[3] += num_tokens

    def read(self) -> SchedulerLoad:
        """What was shown last."""
        words = self._words
        return SchedulerLoad(num_running=words[0], num_waiting=words[1], free_kv_tokens=words[2])

    @property
    def num_tokens(self) -> int:
        """Generated since the start."""
        return int(self._words[3])


class RateMeter:
    """How fast a count grew of late; any thread may ask.

    Args:
        window_s: Over which the rate is taken.
    """

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def rate(self, count: int, now_s: float) -> float:
        """Each second; 0 before the second time that somebody asks."""
        with self._lock:
            while len(self._samples) > 1 and self._samples[1][0] <= now_s - self._window_s:
                self._samples.popleft()
            first_s, first = self._samples[0] if self._samples else (now_s, count)
            if not self._samples or now_s - self._samples[-1][0] >= self._window_s / 50:
                self._samples.append((now_s, count))
        return (count - first) / (now_s - first_s) if now_s > first_s else 0.0
