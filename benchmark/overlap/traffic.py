"""Steady decoding on several attention servers at once, and when each token came."""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field

PROMPT_TOKENS = 2
REQUEST_TIMEOUT_S = 900.0
SKIPPED = 2  # tokens of each request, after which decoding is steady


@dataclass
class Stream:
    """One batch of equal requests to one server."""

    url: str
    batch: int
    num_tokens: int
    seed: int
    # [batch][num_tokens], time.monotonic() when it was received
    times_s: list[list[float]] = field(default_factory=list)
    error: str = ""

    def run(self) -> None:
        """Send and read to the end; what goes wrong is kept in `error`."""
        self.times_s = [[] for _ in range(self.batch)]
        first = 1 + self.seed * self.batch
        body = {
            "input_ids": [[first + index] * PROMPT_TOKENS for index in range(self.batch)],
            "stream": True,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": self.num_tokens,
                "ignore_eos": True,
            },
        }
        request = urllib.request.Request(
            self.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
                for line in response:
                    self._take(line)
        except OSError as error:
            self.error = f"{self.url}: {error}"
        if not self.error and any(len(times_s) != self.num_tokens for times_s in self.times_s):
            lengths = [len(times_s) for times_s in self.times_s]
            self.error = f"{self.url} sent {lengths} tokens, expected {self.num_tokens} each"

    def _take(self, line: bytes) -> None:
        if not line.startswith(b"data: {"):
            return
        now_s = time.monotonic()
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            self.error = f"{self.url}: {event['error']}"
            return
        times_s = self.times_s[event.get("index", 0)]
        times_s += [now_s] * (event["meta_info"]["completion_tokens"] - len(times_s))

    def steady(self) -> tuple[float, float]:
        """From when to when every request was decoding."""
        first_s = max(times_s[SKIPPED - 1] for times_s in self.times_s)
        return first_s, min(times_s[-1] for times_s in self.times_s)

    def step_s(self) -> float:
        """Mean time of a steady step."""
        return statistics.mean(
            (times_s[-1] - times_s[SKIPPED - 1]) / (self.num_tokens - SKIPPED)
            for times_s in self.times_s
        )


def decode(urls: Sequence[str], *, batch: int, num_tokens: int) -> list[Stream]:
    """Run one stream on each server, all at once.

    Raises:
        SystemExit: A request failed.
    """
    streams = [Stream(url, batch, num_tokens, seed) for seed, url in enumerate(urls)]
    threads = [threading.Thread(target=stream.run, daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors := [stream.error for stream in streams if stream.error]:
        raise SystemExit("bench_overlap: " + "; ".join(errors))
    return streams


def throughput(streams: Sequence[Stream]) -> float:
    """Tokens/s of all servers together while all of them were decoding.

    Each stream counts its steps in the common window, the ones at its edges in part.
    """
    start_s = max(stream.steady()[0] for stream in streams)
    stop_s = min(stream.steady()[1] for stream in streams)
    if stop_s <= start_s:
        raise SystemExit("bench_overlap: the servers never decoded at once; give more --tokens")
    tokens = 0.0
    for stream in streams:
        for times_s in stream.times_s:
            tokens += _progress(times_s, stop_s) - _progress(times_s, start_s)
    return tokens / (stop_s - start_s)


def _progress(times_s: list[float], at_s: float) -> float:
    """Number of tokens at that time, with the one that is under way as a fraction."""
    done = sum(1 for time_s in times_s if time_s <= at_s)
    if done in (0, len(times_s)):
        return float(done)
    begun_s, ends_s = times_s[done - 1], times_s[done]
    return done + (at_s - begun_s) / (ends_s - begun_s)
