"""Two thousand spoilt requests: the router lives on, and passes on only what is well-formed."""

from __future__ import annotations

import asyncio

import pytest
from raw_http import ask, post
from raw_server import RawServer
from relay_fuzz import spoilt
from router_harness import RouterProcess

pytestmark = pytest.mark.multiproc

NUM_REQUESTS = 2000
AT_ONCE = 64
ANSWER_S = 0.2
HANG_S = 50.0
RELAYED = (
    *(b"/generate", b"/v1/", b"/tokenize", b"/detokenize", b"/model_info", b"/get_model_info"),
    *(b"/invocations", b"/vertex_generate", b"/api/"),
)


async def _send(
    address: tuple[str, int], data: bytes, gate: asyncio.Semaphore, *, ends: bool
) -> bytes | None:
    """What came back, or None when the router kept a connection on which nothing more can come.

    Args:
        address: Of the router.
        data: What to send.
        gate: Lets some through at the same time.
        ends: Whether to close this side after it, or to wait a little for an answer and to leave.
    """
    async with gate:
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(data)
            if not ends:
                return await asyncio.wait_for(reader.read(1 << 16), ANSWER_S)
            writer.write_eof()
            return await asyncio.wait_for(reader.read(-1), HANG_S)
        except ConnectionError:
            return b""
        except TimeoutError:
            return None if ends else b""
        finally:
            writer.transport.abort()


async def _send_all(address: tuple[str, int], requests: list[bytes]) -> list[bytes | None]:
    gate = asyncio.Semaphore(AT_ONCE)
    return await asyncio.gather(
        *(_send(address, data, gate, ends=number % 2 == 0) for number, data in enumerate(requests))
    )


def test_spoilt_requests_neither_hurt_the_router_nor_reach_a_server(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    requests = spoilt(NUM_REQUESTS)
    first = len(raw_server.seen)

    answers = asyncio.run(_send_all(relay.address, requests))

    assert [data for data, got in zip(requests, answers, strict=True) if got is None] == []
    assert raw_server.malformed == []
    heard = [request.target for request in raw_server.seen[first:]]
    assert [target for target in heard if not target.startswith(RELAYED)] == []
    assert len(heard) > NUM_REQUESTS // 20, "too few survived for the run to mean much"
    assert {answer[:12] for answer in answers if answer} <= KNOWN
    assert "Traceback" not in "".join(relay.log), "".join(relay.log[-60:])
    assert relay.process.poll() is None
    assert ask(relay.address, post()).status == 200


KNOWN = {
    f"HTTP/1.1 {status}".encode()
    for status in (100, 200, 400, 404, 405, 408, 411, 413, 414, 417, 431, 501, 505)
}
