"""What stock SGLang answers for the checkpoints of the GPU tests; every server is asked once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gpu_fleet
from gpu_ahead import Key
from gpu_fleet import START_TIMEOUT_S, say, telling
from gpu_questions import (
    Answers,
    Continuation,
    Distance,
    Text,
    ask_all,
    continue_texts,
    distance,
    forget_prefixes,
    write_texts,
)
from servers import Server, Zygote


@dataclass(frozen=True)
class Words:
    """Of stock SGLang on texts that it wrote itself."""

    texts: list[Text]
    continuations: list[Continuation]
    own_distance: Distance  # between two runs of stock SGLang


class Oracles:
    """Stock servers, started ahead and ended once they were asked."""

    def __init__(self, zygote: Zygote, models: Mapping[Key, Path]) -> None:
        self._zygote, self._models = zygote, models
        self._started: dict[Key, Server] = {}
        self._answers: dict[Key, Answers] = {}
        self._words: dict[Key, Words] = {}
        self._failed: dict[Key, str] = {}

    def start(self, key: Key) -> None:
        """Start its server, unless it was."""
        if key not in self._started and key not in self._answers and key not in self._words:
            say(f"stock {key}: starting")
            self._started[key] = gpu_fleet.start_stock(self._zygote, self._models[key], key[1])

    def answers(self, family: str) -> Answers:
        """In float32, with deterministic inference."""
        key = (family, "exact")
        if key not in self._answers:
            with self._asking(key) as server:
                self._answers[key] = ask_all([server.url])
            say(f"stock {key}: asked")
        return self._answers[key]

    def words(self, family: str, precision: str = "fast") -> Words:
        """In bfloat16."""
        key = (family, precision)
        if key not in self._words:
            with self._asking(key) as server:
                texts = write_texts(server.url)
                continuations = continue_texts([server.url], texts)
                forget_prefixes([server])
                again = continue_texts([server.url], texts)
            self._words[key] = Words(texts, continuations, distance(continuations, again))
            say(f"stock {key}: asked")
        return self._words[key]

    def num_living(self) -> int:
        """Servers that were not asked yet."""
        return sum(server.is_alive() for server in self._started.values())

    def close(self) -> None:
        """End what was not asked."""
        for server in self._started.values():
            server.kill_tree()

    @contextmanager
    def _asking(self, key: Key) -> Iterator[Server]:
        """The server of a key, ready; one that failed fails the next test at once."""
        if key in self._failed:
            raise AssertionError(f"stock {key} failed before: {self._failed[key]}")
        self.start(key)
        server = self._started.pop(key)
        try:
            with telling([server]):
                server.wait("/health", timeout_s=START_TIMEOUT_S)
                yield server
        except BaseException as error:
            self._failed[key] = str(error)[:400]
            raise
