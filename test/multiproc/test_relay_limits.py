"""Every limit has its status code, and what is over it reaches no server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from raw_http import Client, ask, post
from raw_server import RawServer, Talk, answer_ok, wait_until
from relay_corpus import chunked
from router_harness import RouterProcess

pytestmark = pytest.mark.multiproc

FLAGS = (
    *("--max-concurrent-requests", "2", "--queue-size", "1", "--max-body-bytes", "1000"),
    *("--max-header-bytes", "2000", "--max-headers", "20"),
    *("--header-timeout-s", "0.3", "--body-timeout-s", "0.3"),
)


@pytest.fixture(scope="module")
def limited(raw_server: RawServer) -> Iterator[RouterProcess]:
    with RouterProcess(raw_server.url, flags=FLAGS) as router:
        wait_until("ready", lambda: router.servers()[raw_server.url]["state"] == "serving")
        yield router


@pytest.mark.parametrize(
    ("status", "request_bytes"),
    [
        (200, post("/generate?case=limit_ok", b"x" * 1000)),
        (413, post("/generate?case=limit", b"x" * 1001)),
        (413, chunked("/generate?case=limit", b"x" * 600, b"x" * 401)),
        (200, chunked("/generate?case=limit_ok", b"x" * 600, b"x" * 400)),
        (431, post("/generate?case=limit", fields=f"X-A: {'a' * 2000}\r\n")),
        (431, post("/generate?case=limit", fields="X-A: 1\r\n" * 21)),
        (200, post("/generate?case=limit_ok", fields="X-A: 1\r\n" * 10)),
        (200, post("/generate?case=limit_ok", fields=f"X-A: {'a' * 1500}\r\n")),
    ],
)
def test_what_is_too_large_is_told_so(
    limited: RouterProcess, raw_server: RawServer, status: int, request_bytes: bytes
) -> None:
    got = ask(limited.address, request_bytes).status

    assert got == status
    assert raw_server.of_case("limit") == []


@pytest.mark.parametrize(
    "start",
    [
        b"POST /generate?case=late HTTP/1.1\r\nHost: rou",
        b"POST /generate?case=late HTTP/1.1\r\nHost: router\r\nContent-Length: 9\r\n\r\n{}",
        b"POST /generate?case=late HTTP/1.1\r\nHost: router\r\nTransfer-Encoding: chunked\r\n\r\n5",
    ],
    ids=["header", "body", "chunk"],
)
def test_a_request_that_stops_coming_is_a_408(
    limited: RouterProcess, raw_server: RawServer, start: bytes
) -> None:
    with Client(limited.address) as client:
        client.send(start)
        reply = client.reply()
        rest = client.until_closed()

    assert (reply.status, rest) == (408, b"")
    assert raw_server.of_case("late") == []


def _num_queued(router: RouterProcess) -> int:
    text = router.ask("GET", "/metrics").body
    found = re.search(rb"^sgl_router_afd_queued_requests (\d+)$", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_requests_beyond_those_that_run_and_wait_are_a_429(
    limited: RouterProcess, raw_server: RawServer
) -> None:
    async def wait(talk: Talk) -> None:
        await talk.server.gate.wait()
        await answer_ok(talk)

    def num_there() -> int:
        return len(raw_server.of_case("beyond")) + _num_queued(limited)

    raw_server.scripts[b"wait"] = wait
    raw_server.close_gate()
    request = post("/generate?answer=wait&case=beyond")
    with ThreadPoolExecutor(3) as pool:
        taken = []
        for number in (1, 2, 3):  # two relay processes at the same instant may let in one more
            taken.append(pool.submit(ask, limited.address, request))
            wait_until("it runs or waits", lambda number=number: num_there() == number)
        refused = [ask(limited.address, request) for _ in range(3)]
        raw_server.open_gate()
        replies = [each.result() for each in taken]

    assert [reply.status for reply in refused] == [429] * 3
    assert all(int(reply.values("retry-after")[0]) > 0 for reply in refused)
    assert [reply.status for reply in replies] == [200] * 3
    assert len(raw_server.of_case("beyond")) == 3
    assert ask(limited.address, post()).status == 200
