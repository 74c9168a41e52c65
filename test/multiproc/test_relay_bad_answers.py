"""Answers that a server should not give: no client takes one for good, and none gets another's."""

from __future__ import annotations

import threading

import pytest
from raw_http import Client, ask, chunk, post
from raw_server import DEADLINE_S, RawServer, Talk, whole
from router_harness import RouterProcess

pytestmark = pytest.mark.multiproc

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n"
STRAY = whole(b'{"answer": "of somebody else"}')
MALFORMED = {
    "garbage": b"garbage\r\n\r\n",
    "no_status": b"HTTP/1.1 OK\r\nContent-Length: 2\r\n\r\n{}",
    "a_status_of_two_digits": b"HTTP/1.1 20 OK\r\nContent-Length: 2\r\n\r\n{}",
    "length_and_chunks": OK + b"Content-Length: 5\r\n" + CHUNKS + b"\r\n0\r\n\r\n" + STRAY,
    "chunks_and_length": OK + CHUNKS + b"Content-Length: 5\r\n\r\n0\r\n\r\n" + STRAY,
    "two_lengths": OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "a_negative_length": OK + b"Content-Length: -2\r\n\r\n{}",
    "a_length_of_letters": OK + b"Content-Length: two\r\n\r\n{}",
    "an_unknown_coding": OK + b"Transfer-Encoding: gzip\r\n\r\n{}",
    "a_bare_line_feed": OK + b"X-A: 1\nX-B: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a_nul_in_a_value": OK + b"X-A: 1\x002\r\nContent-Length: 2\r\n\r\n{}",
    "a_folded_field": OK + b"X-A: 1\r\n 2\r\nContent-Length: 2\r\n\r\n{}",
    "a_space_in_a_name": OK + b"X A: 1\r\nContent-Length: 2\r\n\r\n{}",
    "a_header_of_1_mb": OK + b"X-A: " + b"a" * (1 << 20) + b"\r\nContent-Length: 2\r\n\r\n{}",
    "another_protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: a\r\n\r\n{}",
    "a_wrong_first_chunk": OK + CHUNKS + b"\r\nzz\r\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_becomes_a_502(
    relay: RouterProcess, raw_server: RawServer, name: str
) -> None:
    async def answer(talk: Talk) -> None:
        await talk.send(MALFORMED[name])

    raw_server.scripts[b"malformed"] = answer

    reply = ask(relay.address, post("/generate?answer=malformed"))

    assert reply.status == 502 and reply.is_whole
    assert raw_server.url.encode() in reply.body
    assert ask(relay.address, post()).body == b'{"answer_of": %d}' % raw_server.port


@pytest.mark.parametrize(
    "rest", [b"zz\r\n{}\r\n0\r\n\r\n", b"3\r\n{}\r\n0\r\n\r\n", b"1" * 20 + b"\r\nx\r\n"]
)
def test_an_answer_that_turns_malformed_is_cut(
    relay: RouterProcess, raw_server: RawServer, rest: bytes
) -> None:
    async def answer(talk: Talk) -> None:
        await talk.send(OK + CHUNKS + b"\r\n" + chunk(b"one"))
        await talk.server.gate.wait()
        await talk.send(rest)

    raw_server.scripts[b"turns_bad"] = answer
    raw_server.close_gate()
    with Client(relay.address) as client:
        client.send(post("/generate?answer=turns_bad"))
        while b"one" not in client.data:
            client.more()
        raw_server.open_gate()

        reply = client.reply()

    assert reply.body.startswith(b"one") and not reply.is_whole


@pytest.mark.parametrize(
    "answer_bytes",
    [
        whole(b"{}") + STRAY,
        OK + CHUNKS + b"\r\n" + chunk(b"{}") + chunk(b"") + STRAY,
        b"HTTP/1.1 204 No Content\r\n\r\n" + STRAY,
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n{}" + STRAY,
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_server_sends_behind_its_answer_reaches_nobody(
    relay: RouterProcess, raw_server: RawServer, answer_bytes: bytes, is_late: bool
) -> None:
    async def answer(talk: Talk) -> None:
        first = answer_bytes.removesuffix(STRAY) if is_late else answer_bytes
        await talk.send(first)
        if is_late:
            await talk.send(STRAY)
        is_sent.set()

    raw_server.scripts[b"stray"] = answer
    is_sent = threading.Event()

    with Client(relay.address) as client:
        client.send(post("/generate?answer=stray"))
        first = client.reply()
        # Behind the next request it could not be told from the answer to that.
        assert is_sent.wait(DEADLINE_S)
        bodies = []
        for _ in range(4):
            client.send(post())
            bodies.append(client.reply().body)

    assert first.status in (200, 204, 304) and first.body in (b"{}", b"")
    assert bodies == [b'{"answer_of": %d}' % raw_server.port] * 4


def test_a_server_that_closes_idle_connections_costs_no_request(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    async def answer(talk: Talk) -> None:
        await talk.send(whole(b"{}"))
        talk.close()
        await talk.writer.wait_closed()
        is_closed.set()

    is_closed = threading.Event()
    raw_server.scripts[b"closes"] = answer

    with Client(relay.address) as client:
        statuses = []
        for _ in range(200):
            client.send(post("/generate?answer=closes", b"x" * 100))
            statuses.append(client.reply().status)
            # What reaches a server that is about to close, it may have begun: no idle connection.
            assert is_closed.wait(DEADLINE_S)
            is_closed.clear()

    assert statuses == [200] * 200
