"""Streaming generations that run beside a test, and what their clients saw."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from typing import Any

PATIENCE_S = 240.0


class Stream:
    """One greedy generation over `/generate`, read by a thread of its own."""

    def __init__(self, url: str, prompt: str, num_tokens: int, **more: Any) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.arrived_s: list[float] = []  # time.monotonic() of each event
        self.error: str | None = None  # what the client was told, or how the stream broke
        self.url = url
        self._body = {
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
            "stream": True,
            **more,
        }
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_for(self, num_tokens: int) -> None:
        """Until so many tokens have arrived; fails the test when the stream ends before."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: len(self.tokens) >= num_tokens or self.error is not None, PATIENCE_S
            )
        assert is_there and self.error is None, f"{len(self.tokens)} tokens, then {self.error}"

    def finish(self) -> list[int]:
        """The tokens of the whole stream."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"still streaming after {len(self.tokens)} tokens"
        return self.tokens

    def longest_gap_s(self, start_s: float = 0.0, stop_s: float = float("inf")) -> float:
        """The longest time between two events, of which the later one lies in the given time."""
        pairs = zip(self.arrived_s, self.arrived_s[1:], strict=False)
        return max((late - early for early, late in pairs if start_s <= late < stop_s), default=0.0)

    def _run(self) -> None:
        request = urllib.request.Request(
            f"{self.url}/generate",
            json.dumps(self._body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                self._read(response)
        except urllib.error.HTTPError as error:
            with error:
                self._fail(f"{error.code} {error.read().decode(errors='replace')}")
        except (OSError, http.client.HTTPException) as error:
            self._fail(repr(error))

    def _read(self, lines: Iterable[bytes]) -> None:
        is_done = False
        for line in lines:
            if line.startswith(b"data: {"):
                self._take(json.loads(line[6:]))
            is_done = is_done or line.startswith(b"data: [DONE]")
        if not is_done:
            self._fail("the stream broke off")

    def _take(self, event: Any) -> None:
        if "error" in event:
            self._fail(str(event["error"]))
            return
        end = event["meta_info"].get("finish_reason") or {}
        if end.get("type") == "abort":  # SGLang repeats the last token here
            self._fail(f"{end.get('status_code')} {end.get('message')}")
            return
        tokens = event["output_ids"]
        if tokens[: len(self.tokens)] != self.tokens:
            self._fail(f"tokens were taken back: {self.tokens} became {tokens}")
        with self._changed:
            self.tokens, self.text = tokens, event["text"]
            pairs = event["meta_info"].get("output_token_logprobs") or ()
            self.logprobs = [pair[0] for pair in pairs]
            self.arrived_s.append(time.monotonic())
            self._changed.notify_all()

    def _fail(self, error: str) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()


def start_streams(
    urls: Sequence[str], prompts: Sequence[str], num_tokens: int, **more: Any
) -> list[Stream]:
    """One stream for each prompt, on the next of `urls`."""
    return [
        Stream(urls[index % len(urls)], prompt, num_tokens, **more)
        for index, prompt in enumerate(prompts)
    ]


def finish_all(streams: Sequence[Stream]) -> list[list[int]]:
    """The tokens of every stream; fails the test when a client saw an error."""
    tokens = [stream.finish() for stream in streams]
    errors = [stream.error for stream in streams if stream.error is not None]
    assert errors == []
    return tokens
