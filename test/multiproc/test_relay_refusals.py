"""What is malformed, too large or not for a server never reaches one, whatever follows it."""

from __future__ import annotations

import threading

import pytest
from raw_http import Client, ask, post
from raw_server import RawServer
from relay_corpus import REFUSED
from router_harness import RouterProcess

pytestmark = pytest.mark.multiproc

CLOSING = (400, 408, 413, 414, 431, 501, 505)  # after these the next byte means nothing


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_request_reaches_no_server(
    relay: RouterProcess, raw_server: RawServer, name: str
) -> None:
    refused = REFUSED[name]
    before = len(raw_server.of_case("bad")), len(raw_server.malformed)

    with Client(relay.address) as client:
        client.send(refused.data)
        if refused.ends_early:
            client.end()
        try:
            status = client.reply().status
        except ConnectionError:
            status = 0
        closes = status in CLOSING and not refused.stays_open
        rest = client.until_closed() if closes else b""

    assert status in refused.statuses
    assert rest == b""
    assert ask(relay.address, post()).status == 200
    assert (len(raw_server.of_case("bad")), len(raw_server.malformed)) == before


def test_the_same_length_twice_is_refused_or_sent_on_once(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    request = post("/generate?case=same_length", b"{}", "Content-Length: 2\r\n")

    status = ask(relay.address, request).status

    assert (status, len(raw_server.of_case("same_length"))) in ((400, 0), (200, 1))
    assert raw_server.malformed == []


def test_pipelined_requests_are_answered_in_their_order(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    requests = [post(f"/generate?case=pipe&n={number}") for number in range(5)]

    with Client(relay.address) as client:
        client.send(b"".join(requests))
        replies = [client.reply() for _ in requests]

    assert [reply.status for reply in replies] == [200] * 5
    heard = [request.target[-1:] for request in raw_server.of_case("pipe")]
    assert heard == [b"0", b"1", b"2", b"3", b"4"]


def test_a_request_behind_a_declined_upgrade_is_served_as_itself(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    fields = "Connection: Upgrade\r\nUpgrade: websocket\r\n"

    with Client(relay.address) as client:
        client.send(post("/generate?case=up", b"one", fields) + post("/generate?case=up", b"two"))
        statuses = [client.reply().status, client.reply().status]

    assert statuses == [200, 200]
    assert [request.body for request in raw_server.of_case("up")] == [b"one", b"two"]


def test_a_malformed_request_behind_a_good_one_is_refused_alone(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    before = len(raw_server.of_case("bad"))

    with Client(relay.address) as client:
        client.send(post("/generate?case=first") + REFUSED["length_and_chunks"].data)
        statuses = [client.reply().status, client.reply().status]
        rest = client.until_closed()

    assert (statuses, rest) == ([200, 400], b"")
    assert len(raw_server.of_case("first")) == 1
    assert len(raw_server.of_case("bad")) == before


def test_a_request_behind_a_refused_body_is_not_read_as_one(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    hidden = post("/generate?case=hidden")

    with Client(relay.address) as client:
        client.send(post("/flush_cache", hidden) + post("/generate?case=behind"))
        statuses = [client.reply().status]
        while not client.has_ended and len(statuses) < 2:
            try:
                statuses.append(client.reply().status)
            except ConnectionError:
                break

    assert statuses in ([404], [404, 200])
    assert raw_server.of_case("hidden") == []
    assert len(raw_server.of_case("behind")) == len(statuses) - 1


def test_the_client_is_told_to_go_on_before_it_sends_its_body(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    request = post("/generate?case=go_on", b"{}", "Expect: 100-continue\r\n")

    with Client(relay.address) as client:
        client.send(request[:-2])
        while not client.data:
            client.more()
        told, heard_before = client.data, len(raw_server.of_case("go_on"))
        client.data = b""
        client.send(request[-2:])
        reply = client.reply()

    assert told.startswith(b"HTTP/1.1 100 ") and heard_before == 0
    assert (reply.status, raw_server.of_case("go_on")[0].body) == (200, b"{}")


def test_a_body_over_the_limit_is_not_asked_for(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    head = "POST /generate?case=bad HTTP/1.1\r\nHost: router\r\nExpect: 100-continue\r\n"

    with Client(relay.address) as client:
        client.send(f"{head}Content-Length: {1 << 50}\r\n\r\n".encode())
        reply = client.reply()

    assert (reply.status, reply.num_informational) == (413, 0)


def test_a_thousand_declined_upgrades_in_one_piece_are_served(relay: RouterProcess) -> None:
    request = (
        b"GET /v1/models HTTP/1.1\r\nHost: router\r\nConnection: Upgrade\r\nUpgrade: a\r\n\r\n"
    )

    with Client(relay.address) as client:
        # Who reads no answer may be read no further: it sends and reads at once.
        sender = threading.Thread(target=client.send, args=[request * 1500])
        sender.start()
        statuses = [client.reply().status for _ in range(1500)]
        sender.join()

    assert statuses == [200] * 1500
