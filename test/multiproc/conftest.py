"""One router before one fake server for all relay tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from raw_server import RawServer, wait_until
from router_harness import RouterProcess


@pytest.fixture(scope="session")
def raw_server() -> Iterator[RawServer]:
    with RawServer() as server:
        yield server


@pytest.fixture(scope="session")
def relay(raw_server: RawServer) -> Iterator[RouterProcess]:
    """A router with limits that tests can reach."""
    # A test that waits for an answer shall not get that of a limit of time.
    flags = ("--header-timeout-s", "3600", "--body-timeout-s", "3600")
    with RouterProcess(raw_server.url, flags=flags) as router:
        wait_until(
            "the router knows the server",
            lambda: router.servers()[raw_server.url]["state"] == "serving",
        )
        yield router
