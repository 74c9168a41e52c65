"""Streams through a router, and exactly how each of them ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from raw_http import Client, Message, post

PATIENCE_S = 150.0
DONE = b"data: [DONE]"
JSON = "Content-Type: application/json\r\n"


class RoutedStream:
    """One greedy generation of `/generate`, read by a thread of its own.

    Args:
        address: Of the router.
        prompt: Of the request.
        num_tokens: Exactly so many are asked for.
        fields: More of the body.
    """

    def __init__(
        self, address: tuple[str, int], prompt: str, num_tokens: int, **fields: Any
    ) -> None:
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling, "stream": True, **fields}
        self.num_tokens = num_tokens
        self.message: Message | None = None  # the answer, or what came of it
        self._failure = ""
        self._client = Client(address, timeout_s=PATIENCE_S)
        try:
            self._client.send(post(body=json.dumps(body).encode(), fields=JSON))
        except OSError:
            self._client.socket.close()
            raise
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def has_begun(self) -> bool:
        """Did a token arrive yet?"""
        data = self.message.body if self.message is not None else self._client.data
        return b'"output_ids"' in data

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> Message:
        """The whole answer, or what came of it."""
        self._thread.join(PATIENCE_S)
        assert self.message is not None, self._failure or f"no end: {self._client.data[-300:]!r}"
        return self.message

    def events(self) -> list[Any]:
        """What the answer says, `[DONE]` left out."""
        lines = self.finish().body.split(b"\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

    def tokens(self) -> list[int]:
        """All of them, as far as they came."""
        said = [event["output_ids"] for event in self.events() if "output_ids" in event]
        return list(said[-1]) if said else []

    def error(self) -> str:
        """What is wrong with how it ended; "" for a stream that is whole."""
        message = self.finish()
        if message.status != 200:
            return f"{message.status} {message.body[:500]!r}"
        for event in self.events():
            if "error" in event:
                return f"error event: {event['error']}"
            end = event["meta_info"].get("finish_reason") or {}
            if end.get("type") == "abort":
                return f"aborted: {end}"
        if not message.is_whole or DONE not in message.body:
            return f"is whole: {message.is_whole}, is done: {DONE in message.body}"
        if len(self.tokens()) != self.num_tokens:
            return f"{len(self.tokens())} of {self.num_tokens} tokens"
        return ""

    def ended_broken(self) -> bool:
        """Did the client hear of it in an event, get no `[DONE]`, and see the transfer break?"""
        message = self.finish()
        has_event = any("error" in event for event in self.events())
        return has_event and DONE not in message.body and not message.is_whole

    def _run(self) -> None:
        try:
            self.message = self._client.reply()
        except (OSError, ValueError) as error:
            self._failure = repr(error)
        finally:
            self._client.socket.close()


class Load:
    """Clients that ask one request after the other until they are told to stop.

    Args:
        address: Of the router.
        prompts: One client for each.
        num_tokens: Of each answer.
    """

    def __init__(self, address: tuple[str, int], prompts: Sequence[str], num_tokens: int) -> None:
        self.num_begun = 0
        self._errors: list[tuple[int, str]] = []  # each with how many had begun before it
        self.answers: dict[str, set[tuple[int, ...]]] = {}  # different ones, by prompt
        self.num_answers = 0
        self._address = address
        self._num_tokens = num_tokens
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in prompts]
        for thread in self._threads:
            thread.start()

    @property
    def errors(self) -> list[str]:
        """Of requests that did not end well."""
        return self.errors_since(0)

    def errors_since(self, num_begun: int) -> list[str]:
        """The same, without the so many requests that began first."""
        with self._lock:
            return [error for number, error in self._errors if number >= num_begun]

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _run(self, prompt: str) -> None:
        while not self._is_over.is_set():
            with self._lock:
                number, self.num_begun = self.num_begun, self.num_begun + 1
            try:
                stream = RoutedStream(self._address, prompt, self._num_tokens)
                error, tokens = stream.error(), stream.tokens()
            except (OSError, AssertionError) as failure:
                error, tokens = repr(failure), []
                self._is_over.wait(0.2)
            with self._lock:
                self.num_answers += 1
                if error:
                    self._errors.append((number, error))
                else:
                    self.answers.setdefault(prompt, set()).add(tuple(tokens))
