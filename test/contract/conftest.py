"""The transports that the contract holds for; a new one is one more line in `TRANSPORTS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transports import Fleet, Loopback, Transport, Zmq

TRANSPORTS: dict[str, Callable[[Path], Transport]] = {
    "loopback": lambda directory: Loopback(),
    "zmq-ipc": lambda directory: Zmq("ipc", directory),
    "zmq-tcp": lambda directory: Zmq("tcp", directory),
}


@pytest.fixture(params=TRANSPORTS)
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """Ranks and links over one transport."""
    yield from _fleet(request.param, tmp_path)


@pytest.fixture(params=[name for name in TRANSPORTS if name.startswith("zmq")])
def zmq_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """The same, over sockets that a stranger can connect to."""
    yield from _fleet(request.param, tmp_path)


def _fleet(name: str, directory: Path) -> Iterator[Fleet]:
    fleet = Fleet(TRANSPORTS[name](directory))
    yield fleet
    fleet.close()
