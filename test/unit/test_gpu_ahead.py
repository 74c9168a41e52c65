"""Servers of GPU tests are started in the order of the tests, and never too many at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu_ahead import Ahead, Setup


class FakeServer:
    def __init__(self) -> None:
        self.is_running = True

    def is_alive(self) -> bool:
        return self.is_running

    def kill_tree(self) -> None:
        self.is_running = False


def _end(started: Any) -> None:
    for server in started.servers:
        server.kill_tree()


class Starts:
    """Setups of fake servers, and which of them were started."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.servers: list[FakeServer] = []

    def setup(self, name: str, number: int) -> Setup[Any]:
        def start(stage: object) -> Any:
            self.names.append(name)
            servers = [FakeServer() for _ in range(number)]
            self.servers += servers
            return SimpleNamespace(servers=servers)

        return Setup(name, number, start)


def _ahead(
    setups: list[Setup[Any]], most_servers: int, count_others: Callable[[], int] = lambda: 0
) -> Ahead:
    stage: Any = SimpleNamespace(directory=Path())
    ahead = Ahead(stage, setups, most_servers, count_others)
    ahead.fill()
    return ahead


def test_what_fits_is_started_and_the_next_once_a_test_has_ended_its_servers() -> None:
    starts = Starts()
    first, second, third = (starts.setup(name, 2) for name in "abc")
    ahead = _ahead([first, second, third], 4)

    at_first = list(starts.names)
    taken = ahead.take(first)
    before_its_end = list(starts.names)
    _end(taken)
    ahead.take(second)

    assert at_first == before_its_end == ["a", "b"]
    assert starts.names == ["a", "b", "c"]


def test_a_setup_that_never_fits_is_started_when_it_is_taken_and_not_twice() -> None:
    starts = Starts()
    small, large = starts.setup("small", 1), starts.setup("large", 9)
    ahead = _ahead([small, large], 4)
    _end(ahead.take(small))

    started = ahead.take(large)

    assert len(started.servers) == 9
    assert starts.names == ["small", "large"]


def test_stock_servers_that_live_take_the_place_of_others() -> None:
    starts, stock = Starts(), [FakeServer(), FakeServer()]
    first, second = starts.setup("a", 2), starts.setup("b", 2)
    ahead = _ahead([first, second], 4, lambda: sum(each.is_alive() for each in stock))
    at_first = list(starts.names)
    for server in stock:
        server.kill_tree()

    ahead.take(first)

    assert at_first == ["a"]
    assert starts.names == ["a", "b"]


def test_nothing_lives_on_after_the_end_taken_or_not() -> None:
    starts = Starts()
    first, second = starts.setup("a", 1), starts.setup("b", 2)
    ahead = _ahead([first, second], 8)
    taken = ahead.take(first)
    taken.servers.append(FakeServer())  # a test's own

    in_use = ahead.in_use()
    ahead.close()

    assert in_use == taken.servers
    assert not any(server.is_running for server in taken.servers)
    assert [server.is_running for server in starts.servers] == [False] * 3
