"""A pair probe over a real connection."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from one_answer import answering

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.control.plane import Probe
from sgl_router_afd.control.probe import Outcome
from sgl_router_afd.keys import NO_KEY, Key
from sgl_router_afd.pair_probe import MAX_ANSWER_BYTES, REQUEST_ID_PREFIX, make_probe
from sgl_router_afd.upstream_session import open_session


def an_answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


async def probed(
    sent: bytes | None, *, api_key: Key = NO_KEY, timeout_s: float = 30.0
) -> tuple[Outcome, str, bytes]:
    """Probe a server that answers so, or not at all; returns what it was sent, too."""
    async with answering(sent) as server, open_session(RouterConfig()) as session:
        probe = Probe(server_id="attn-0", url=server.url, attachment=())
        outcome, detail = await make_probe(probe, session, api_key=api_key, timeout_s=timeout_s)
    # One that gives up soon may not even have got to sending.
    return outcome, detail, server.received[0] if server.received else b""


ONE_TOKEN = json.dumps({"text": "a", "meta_info": {"completion_tokens": 1}}).encode()


def test_a_token_proves_the_pair_and_was_asked_for_with_the_key_and_an_id() -> None:
    outcome, detail, received = asyncio.run(probed(an_answer(200, ONE_TOKEN), api_key=Key(b"k")))

    head, _, body = received.partition(b"\r\n\r\n")
    asked = json.loads(body)
    assert (outcome, detail) == (Outcome.PASSED, "")
    assert head.startswith(b"POST /generate HTTP/1.1") and b"Authorization: Bearer k" in head
    assert asked["rid"].startswith(REQUEST_ID_PREFIX) and asked["rid"].encode() in head
    assert asked["sampling_params"]["max_new_tokens"] == 1


@pytest.mark.parametrize(
    ("status", "body", "outcome", "detail"),
    [
        (401, b"no key", Outcome.DECLINED, "HTTP 401: no key"),
        (503, b"soon", Outcome.STALLED, "HTTP 503: soon"),
        (500, b"oops", Outcome.FAILED, "HTTP 500: oops"),
        (307, b"", Outcome.FAILED, "HTTP 307: "),
        (200, b"[]", Outcome.FAILED, "no token in '[]'"),
        (200, b'{"meta_info":{"completion_tokens":0}}', Outcome.FAILED, "no token in"),
        (200, b"\xff", Outcome.FAILED, "no token in"),
    ],
)
def test_any_other_answer_proves_nothing_and_is_told(
    status: int, body: bytes, outcome: Outcome, detail: str
) -> None:
    came_out, told, received = asyncio.run(probed(an_answer(status, body)))

    assert came_out is outcome and told.startswith(detail)
    assert b"Authorization" not in received


def test_a_connection_that_breaks_has_failed() -> None:
    assert asyncio.run(probed(b""))[0] is Outcome.FAILED


def test_an_answer_that_never_ends_has_failed() -> None:
    sent = an_answer(200, bytes(MAX_ANSWER_BYTES + 1))

    outcome, detail, _ = asyncio.run(probed(sent))

    assert (outcome, detail) == (
        Outcome.FAILED,
        f"its answer is longer than {MAX_ANSWER_BYTES} bytes",
    )


def test_no_answer_in_time_is_a_stall() -> None:
    outcome, detail, _ = asyncio.run(probed(None, timeout_s=0.05))

    assert (outcome, detail) == (Outcome.STALLED, "no answer within 0.05 s")


def test_a_server_that_nobody_listens_at_is_unreachable() -> None:
    async def probe() -> tuple[Outcome, str]:
        with socket.socket() as bound:  # and nobody listens
            bound.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            one = Probe(server_id="attn-0", url=url, attachment=())
            async with open_session(RouterConfig()) as session:
                return await make_probe(one, session, api_key=NO_KEY, timeout_s=30.0)

    assert asyncio.run(probe()) == (Outcome.UNREACHABLE, "connection refused")
