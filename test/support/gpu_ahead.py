"""Starts servers before the tests that want them, so that few tests wait for a start.

A test says what it wants by a mark, `pytest.mark.wants(SETUP)`. Setups are started in the order of
the selected tests, as many as may run at once; a test takes its own and ends it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gpu_fleet import IS_CPU, say
from servers import Server, Zygote

Key = tuple[str, str]  # a family and a precision
# Stock ones included. Twenty-four under one MPS daemon ran out of what a context needs when they
# started at once; fourteen did not.
MOST_SERVERS = int(os.environ.get("TEST_AHEAD", "2" if IS_CPU else "14"))


class HasServers(Protocol):
    """What a setup starts."""

    @property
    def servers(self) -> Sequence[Server]:
        """All of them, to be ended by the test."""


@dataclass(frozen=True)
class Started:
    """Servers by name."""

    by_name: Mapping[str, Server]

    @property
    def servers(self) -> list[Server]:
        """All of them."""
        return list(self.by_name.values())

    def __getitem__(self, name: str) -> Server:
        return self.by_name[name]


@dataclass(frozen=True)
class Stage:
    """Where servers are started."""

    zygote: Zygote
    models: Mapping[Key, Path]
    directory: Path  # for files of their own


S = TypeVar("S", bound=HasServers)


@dataclass(frozen=True)
class Setup(Generic[S]):
    """Servers that a test wants: `start` starts them and waits for none."""

    name: str
    num_servers: int
    start: Callable[[Stage], S]
    stock: tuple[Key, ...] = ()  # models that stock SGLang is asked about


class Ahead:
    """Hands out setups, the next ones on their way.

    Args:
        stage: Where they start.
        to_come: In the order of the tests.
        most_servers: That may live at once; a setup that is taken starts whatever lives.
        count_others: How many live that are not of setups.
    """

    def __init__(
        self,
        stage: Stage,
        to_come: Sequence[Setup[Any]],
        most_servers: int = MOST_SERVERS,
        count_others: Callable[[], int] = lambda: 0,
    ) -> None:
        self._count_others = count_others
        self._stage = stage
        self._to_come = list(to_come)
        self._most_servers = most_servers
        self._started: dict[str, HasServers] = {}
        self._servers: list[Server] = []
        self._taken: list[HasServers] = []

    def fill(self) -> None:
        """Start what fits beside the servers that live."""
        while self._to_come and self._fits(self._to_come[0]):
            self._start(self._to_come.pop(0))

    def take(self, setup: Setup[S]) -> S:
        """The servers of a setup; the caller waits for them and ends them."""
        self._to_come = [each for each in self._to_come if each.name != setup.name]
        if setup.name not in self._started:
            self._start(setup)
        taken: Any = self._started.pop(setup.name)
        self._taken.append(taken)
        self.fill()
        return taken  # type: ignore[no-any-return]

    def in_use(self) -> list[Server]:
        """Servers of the running test that live, those included that it started itself."""
        every = [server for taken in self._taken for server in taken.servers]
        return [server for server in every if server.is_alive()]

    def close(self) -> None:
        """End what nobody took, and what a test left."""
        for server in [*self._servers, *self.in_use()]:
            if server.is_alive():
                server.kill_tree()

    def _fits(self, setup: Setup[Any]) -> bool:
        living = sum(server.is_alive() for server in self._servers) + self._count_others()
        return living + setup.num_servers <= self._most_servers

    def _start(self, setup: Setup[Any]) -> None:
        say(f"{setup.name}: starting")
        started = setup.start(self._stage)
        self._started[setup.name] = started
        self._servers += started.servers
