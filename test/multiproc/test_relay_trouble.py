"""Servers that die, clients that leave or are slow, and what the router makes of it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from process_trees import memory_bytes
from raw_http import Client, Message, ask, chunk, post
from raw_server import (
    DONE,
    SSE_HEAD,
    RawServer,
    Script,
    Talk,
    answer_ok,
    event,
    wait_until,
    whole,
)
from relay_corpus import FIVE_MB
from router_harness import RouterProcess

pytestmark = pytest.mark.multiproc

STALLED = {"role": "attn", "state": "stalled", "reason": "waits for MLP rank 1"}
NUM_SLOW_READERS = 256
FLOOD_PIECE = b"data: " + b"x" * (64 * 1024 - 8) + b"\n\n"
# Buffers on both sides of every stream, beside what the kernel keeps.
MAX_BYTES_FOR_A_SLOW_READER = 512 * 1024
NUM_UPLOADS = 8
UPLOAD_TIMES = 6
UPLOAD_PIECE_BYTES = 64 * 1024
MAX_BYTES_FOR_AN_UPLOAD = 4 << 20  # a body that may be sent again is kept up to 1 MiB
EVENTS_UNTIL_THE_END = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.fixture(scope="module")
def other_server() -> Iterator[RawServer]:
    with RawServer() as server:
        yield server


@pytest.fixture(scope="module")
def pair(raw_server: RawServer, other_server: RawServer) -> Iterator[RouterProcess]:
    flags = ("--hold-timeout", "3600", "--max-concurrent-requests", "2")
    flags += ("--queue-timeout-s", "0.3", "--relay-processes", "1")
    with RouterProcess(raw_server.url, other_server.url, flags=flags) as router:
        _wait_until_used(router, raw_server, other_server)
        yield router


# What the control process says is known to its relay process a moment later.


def _wait_until_used(router: RouterProcess, *servers: RawServer) -> None:
    before = [len(server.of_case("is_it_used")) for server in servers]

    def are_used() -> bool:
        ask(router.address, post("/generate?case=is_it_used"))
        now = [len(server.of_case("is_it_used")) for server in servers]
        return all(after > first for after, first in zip(now, before, strict=True))

    wait_until("all are used", are_used)


def _wait_until_held(router: RouterProcess) -> None:
    def is_held() -> bool:
        with Client(router.address) as client:
            client.send(post("/generate?case=is_it_held"))
            wait_until("held or answered", lambda: client.has_more() or _num_held(router) == 1)
            return not client.has_more()

    wait_until("requests are held", is_held)
    _wait_for_held(router, 0)


def _wait_for_held(router: RouterProcess, number: int) -> None:
    wait_until(f"{number} are held", lambda: _num_held(router) == number)


def _num_held(router: RouterProcess) -> int:
    found = re.search(rb"^sgl_router_afd_held_requests (\d+)$", _metrics(router), re.MULTILINE)
    assert found is not None
    return int(found[1])


def _metrics(router: RouterProcess) -> bytes:
    return router.ask("GET", "/metrics").body


def _script(name: str, script: Script, *servers: RawServer) -> None:
    for server in servers:
        server.scripts[name.encode()] = script
        server.close_gate()


async def one_event_then_the_rest(talk: Talk) -> None:
    await talk.send(SSE_HEAD + event("1"))
    await talk.server.gate.wait()
    await talk.send(event("2") + DONE)


async def never(talk: Talk) -> None:
    await talk.server.gate.wait()
    await answer_ok(talk)


@pytest.mark.parametrize("script", [one_event_then_the_rest, never])
def test_a_server_sees_that_the_client_left(
    relay: RouterProcess, raw_server: RawServer, script: Script
) -> None:
    target = f"/generate?answer=left&case={script.__name__}"
    _script("left", script, raw_server)
    with Client(relay.address) as client:
        client.send(post(target))
        wait_until("the request is there", lambda: bool(raw_server.of_case(script.__name__)))
        if script is one_event_then_the_rest:
            while b"data: 1" not in client.data:
                client.more()

    wait_until("the server sees it", lambda: target.encode() in raw_server.left)
    wait_until("nothing in flight", lambda: relay.servers()[raw_server.url]["num_in_flight"] == 0)


def _cut_stream(relay: RouterProcess, server: RawServer, start: bytes, manner: str) -> Message:
    async def die_inside(talk: Talk) -> None:
        await talk.send(start)
        await talk.server.gate.wait()
        if manner == "reset":
            talk.reset()
        else:
            talk.close()

    _script("die_inside", die_inside, server)
    with Client(relay.address) as client:
        client.send(post("/generate?answer=die_inside&case=die_inside"))
        while b"one" not in client.data:
            client.more()
        server.open_gate()
        return client.reply()


@pytest.mark.parametrize(
    ("start", "manner"),
    [
        (SSE_HEAD + event("one"), "reset"),
        (SSE_HEAD + event("one"), "closed"),
        (SSE_HEAD + event("one") + b"20\r\ndata: tw", "closed"),
        (SSE_HEAD + chunk(b"data: one\n\ndata: tw"), "reset"),
        (EVENTS_UNTIL_THE_END + b"data: one\n\n", "reset"),
    ],
)
def test_a_stream_whose_server_dies_ends_in_an_error_event_and_is_not_whole(
    relay: RouterProcess, raw_server: RawServer, start: bytes, manner: str
) -> None:
    first = len(raw_server.of_case("die_inside"))

    reply = _cut_stream(relay, raw_server, start, manner)

    *_, last = [part for part in reply.body.split(b"\n\n") if part]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == 502 and raw_server.url in error["message"]
    assert b"data: one\n\n" in reply.body and b"[DONE]" not in reply.body
    assert not reply.is_whole
    assert len(raw_server.of_case("die_inside")) == first + 1


@pytest.mark.parametrize("manner", ["reset", "closed"])
@pytest.mark.parametrize(
    "start",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"text": "one',
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b'{"text": "one'),
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"packed one"),
    ],
)
def test_a_body_without_events_is_only_cut(
    relay: RouterProcess, raw_server: RawServer, start: bytes, manner: str
) -> None:
    reply = _cut_stream(relay, raw_server, start, manner)

    assert not reply.is_whole
    assert reply.body in (b'{"text": "one', b"packed one")


@pytest.mark.parametrize("manner", ["reset", "closed"])
@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Ty", SSE_HEAD], ids=["nothing", "half", "head"]
)
def test_a_request_without_a_token_is_sent_again_to_the_other_server(
    pair: RouterProcess, raw_server: RawServer, other_server: RawServer, sent: bytes, manner: str
) -> None:
    servers = (raw_server, other_server)
    case = f"again_{manner}_{len(sent)}"

    async def die_once(talk: Talk) -> None:
        if sum(len(server.of_case(case)) for server in servers) == 2:
            await answer_ok(talk)
            return
        if sent:
            await talk.send(sent)
        if manner == "reset":
            talk.reset()
        else:
            talk.close()

    _script("die_once", die_once, *servers)
    body = bytes(range(256)) * 1200

    reply = ask(pair.address, post(f"/generate?answer=die_once&case={case}", body, "X-A: 1\r\n"))

    assert reply.status == 200
    (first,), (second,) = (server.of_case(case) for server in servers)
    assert first.body == second.body == body
    assert _without_host(first) == _without_host(second)


def _without_host(message: Message) -> list[tuple[bytes, bytes]]:
    return [field for field in message.fields if field[0].lower() != b"host"]


def test_a_request_on_which_every_server_dies_is_given_up_after_each_was_tried(
    pair: RouterProcess, raw_server: RawServer, other_server: RawServer
) -> None:
    async def die(talk: Talk) -> None:
        talk.reset()

    _script("die", die, raw_server, other_server)

    reply = ask(pair.address, post("/generate?answer=die&case=die"))

    assert reply.status in (502, 503)
    # A connection that was open already may have been closed for its age: then one more is tried.
    tries = [len(server.of_case("die")) for server in (raw_server, other_server)]
    assert all(1 <= each <= 2 for each in tries), tries


def test_requests_are_held_while_all_are_stalled_and_served_when_one_is_back(
    pair: RouterProcess, raw_server: RawServer, other_server: RawServer
) -> None:
    servers = (raw_server, other_server)
    raw_server.status = other_server.status = STALLED
    _wait_until_held(pair)
    with Client(pair.address) as leaver:
        leaver.send(post("/generate?case=left_while_held"))
        _wait_for_held(pair, 1)
    _wait_for_held(pair, 0)

    with Client(pair.address) as client:
        client.send(post("/generate?case=held"))
        _wait_for_held(pair, 1)
        heard_meanwhile = sum(len(server.of_case("held")) for server in servers)
        other_server.status = {"role": "attn", "state": "ready"}
        reply = client.reply()

    raw_server.status = {"role": "attn", "state": "ready"}
    _wait_until_used(pair, *servers)
    assert heard_meanwhile == 0
    assert reply.status == 200 and len(other_server.of_case("held")) == 1
    assert other_server.of_case("left_while_held") == []


def test_a_request_that_is_held_too_long_is_a_503_that_says_why() -> None:
    with (
        RawServer(status=STALLED) as server,
        RouterProcess(server.url, flags=("--hold-timeout", "0.2")) as router,
    ):
        why = "waits for MLP rank 1"
        wait_until("that is known", lambda: why in router.servers()[server.url]["reason"])

        late = ask(router.address, post("/generate?case=held_too_long"))

        assert late.status == 503 and int(late.values("retry-after")[0]) > 0
        assert why.encode() in late.body
        assert server.of_case("held_too_long") == []


def test_a_request_that_waits_too_long_for_its_turn_is_a_503(
    pair: RouterProcess, raw_server: RawServer, other_server: RawServer
) -> None:
    _script("running", never, raw_server, other_server)
    with Client(pair.address) as one, Client(pair.address) as two:
        for client in (one, two):
            client.send(post("/generate?answer=running&case=running"))
        wait_until(
            "two run",
            lambda: len(raw_server.of_case("running")) + len(other_server.of_case("running")) == 2,
        )

        third = ask(pair.address, post("/generate?case=third"))

        raw_server.open_gate()
        other_server.open_gate()
        assert [client.reply().status for client in (one, two)] == [200, 200]
    assert third.status == 503 and int(third.values("retry-after")[0]) > 0
    assert raw_server.of_case("third") == other_server.of_case("third") == []


def test_slow_readers_cost_the_router_a_bounded_amount_of_memory(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    num_pieces: list[int] = []  # of each stream that ended

    async def flood(talk: Talk) -> None:
        """As much as the buffers on the way take, whatever their size; one stream may end."""
        await talk.send(SSE_HEAD)
        number = 0
        while not (may_end.is_set() and talk.request.target.endswith(b"&n=0")):
            await talk.send(chunk(FLOOD_PIECE))
            number += 1
        await talk.send(DONE)
        num_pieces.append(number)

    may_end = threading.Event()
    _script("flood", flood, raw_server)
    memory = memory_bytes(relay.process.pid)
    raw_server.left.clear()
    with ExitStack() as stack:
        readers = [stack.enter_context(_slow_reader(relay)) for _ in range(NUM_SLOW_READERS)]
        for number, reader in enumerate(readers):
            reader.send(post(f"/generate?answer=flood&case=flood&n={number}"))
        wait_until("all run", lambda: len(raw_server.of_case("flood")) == NUM_SLOW_READERS)
        for _ in _while_it_moves(lambda: raw_server.num_sent_bytes):
            growth = memory_bytes(relay.process.pid) - memory
            assert growth < NUM_SLOW_READERS * MAX_BYTES_FOR_A_SLOW_READER

        assert ask(relay.address, post()).status == 200
        may_end.set()
        readers[0].read_fast()
        reply = readers[0].reply()
    wait_until("the others are left", lambda: len(raw_server.left) == NUM_SLOW_READERS - 1)
    assert reply.is_whole and reply.body == FLOOD_PIECE * num_pieces[0] + b"data: [DONE]\n\n"
    assert len(num_pieces) == 1


def _slow_reader(relay: RouterProcess) -> Client:
    return Client(relay.address, is_slow_reader=True)


def _while_it_moves(number: Callable[[], int]) -> Iterator[None]:
    """Now and then, until a number has stayed the same for a while; then once more.

    On a machine with no time for anybody that is too early: what is looked at is then less, and
    what is wrong with it may be missed, but what is right stays right.
    """
    last = -1
    while last != (last := number()):
        yield
        time.sleep(0.4)
    yield


def test_servers_that_read_slowly_cost_the_router_a_bounded_amount_of_memory(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    raw_server.close_gate()
    body = FIVE_MB * UPLOAD_TIMES
    memory = memory_bytes(relay.process.pid)
    sent: list[int] = []
    with ThreadPoolExecutor(NUM_UPLOADS) as pool, _open_at_the_end(raw_server):
        request = post("/generate?case=deaf", body)
        asked = [pool.submit(_upload, relay, request, sent) for _ in range(NUM_UPLOADS)]
        wait_until("all run", lambda: len(sent) >= NUM_UPLOADS)
        for _ in _while_it_moves(lambda: len(sent)):
            growth = memory_bytes(relay.process.pid) - memory
            assert growth < NUM_UPLOADS * MAX_BYTES_FOR_AN_UPLOAD
        raw_server.open_gate()
        replies = [each.result() for each in asked]

    assert [reply.status for reply in replies] == [200] * NUM_UPLOADS
    assert all(request.body == body for request in raw_server.of_case("deaf"))
    assert len(raw_server.of_case("deaf")) == NUM_UPLOADS


@contextmanager
def _open_at_the_end(server: RawServer) -> Iterator[None]:
    """Let the clients end whatever happens."""
    try:
        yield
    finally:
        server.open_gate()


def _upload(relay: RouterProcess, request: bytes, sent: list[int]) -> Message:
    """Send it piece by piece, and tell each that is sent."""
    with Client(relay.address) as client:
        for at in range(0, len(request), UPLOAD_PIECE_BYTES):
            client.send(request[at : at + UPLOAD_PIECE_BYTES])
            sent.append(at)
        return client.reply()


def test_slow_senders_keep_nobody_from_being_served(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    request = post("/generate?case=slow_sender", b"0123456789" * 3)
    with ExitStack() as stack:
        idlers = [stack.enter_context(Client(relay.address)) for _ in range(100)]
        for idler in idlers:
            idler.send(request[:40])
        with Client(relay.address) as slow:
            for at in range(len(request)):
                slow.send(request[at : at + 1])
                time.sleep(0.001)

            reply = slow.reply()

    assert reply.status == 200
    (heard,) = raw_server.of_case("slow_sender")
    assert heard.body == b"0123456789" * 3


def test_a_body_sent_slowly_and_read_slowly_arrives_whole(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    body = bytes(range(256)) * 20_000

    async def echo(talk: Talk) -> None:
        await talk.send(whole(talk.request.body))

    _script("echo", echo, raw_server)
    with _slow_reader(relay) as client:
        sender = threading.Thread(target=client.send, args=[post("/generate?answer=echo", body)])
        sender.start()
        reply = client.reply()
        sender.join()

    assert reply.body == body
