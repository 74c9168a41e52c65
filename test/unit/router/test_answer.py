from __future__ import annotations

import pytest

from sgl_router_afd.dataplane.answer import Answer
from sgl_router_afd.dataplane.request import Request


def answer(*headers: tuple[bytes, bytes], status: int = 200) -> Answer:
    made = Answer()
    made.status, made.reason, made.headers = status, b"Fine", list(headers)
    made.read_headers(b"id-1")
    return made


def request(method: bytes = b"POST", *, is_http_10: bool = False) -> Request:
    made = Request()
    made.method, made.is_http_10 = method, is_http_10
    return made


CHUNKED = (b"transfer-encoding", b"chunked")
LENGTH = (b"Content-Length", b"3")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


def test_the_head_has_the_servers_fields_the_requests_id_and_one_framing() -> None:
    made = answer((b"Server", b"u"), (b"keep-alive", b"timeout=5"), CHUNKED)

    head = made.head_for(request(), is_framed=True, keeps_alive=True)

    assert head == (
        b"HTTP/1.1 200 Fine\r\nServer: u\r\nX-Request-Id: id-1\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )


def test_an_id_of_the_server_is_left_alone() -> None:
    made = answer((b"X-Request-Id", b"theirs"), LENGTH)

    assert made.lines == [b"X-Request-Id: theirs\r\n", b"Content-Length: 3\r\n"]


@pytest.mark.parametrize(
    ("made", "asked", "is_framed", "ends_with_connection"),
    [
        (answer(CHUNKED), request(), True, False),
        (answer(CHUNKED), request(is_http_10=True), False, False),
        (answer(LENGTH), request(), False, False),
        (answer(), request(), True, True),
        (answer(), request(is_http_10=True), False, True),
        (answer(status=204), request(), False, False),
        (answer(LENGTH, status=304), request(), False, False),
        (answer(CHUNKED), request(b"HEAD"), False, False),
    ],
)
def test_a_body_is_framed_as_its_client_can_read_it(
    made: Answer, asked: Request, is_framed: bool, ends_with_connection: bool
) -> None:
    assert made.is_framed_for(asked) is is_framed
    assert made.ends_with_connection is ends_with_connection


@pytest.mark.parametrize(
    ("made", "takes"),
    [
        (answer(EVENTS, CHUNKED), True),
        (answer(EVENTS), True),
        (answer(EVENTS, LENGTH), False),
        (answer(EVENTS, CHUNKED, (b"Content-Encoding", b"gzip")), False),
        (answer((b"content-type", b"application/json"), CHUNKED), False),
    ],
)
def test_only_a_plain_stream_of_events_takes_one_more(made: Answer, takes: bool) -> None:
    assert made.takes_an_event is takes


def test_a_coding_that_the_router_cannot_follow_is_malformed() -> None:
    assert answer((b"Transfer-Encoding", b"gzip")).malformation
    assert not answer(CHUNKED).malformation
