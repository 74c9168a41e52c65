"""What the parser lets through, and the router does not."""

from __future__ import annotations

import pytest

from sgl_router_afd.dataplane.checks import Limits, examine
from sgl_router_afd.dataplane.request import Request

LIMITS = Limits(max_headers=7, max_header_bytes=1000, max_body_bytes=100)
HOST = (b"Host", b"router:1")


def request(*fields: tuple[bytes, bytes], target: bytes = b"/generate?a=b") -> Request:
    made = Request()
    made.method, made.target, made.headers = b"POST", target, list(fields)
    return made


def test_a_good_request_goes_on_with_its_fields_and_its_framing_written_anew() -> None:
    made = request(HOST, (b"X-Odd", b"1"), (b"content-length", b"007"), (b"TE", b"trailers"))
    made.headers += [(b"X-Request-ID", b"mine"), (b"Connection", b"close, x-hop"), (b"X-Hop", b"1")]

    refusal = examine(made, "1.1", LIMITS)

    assert refusal is None
    assert (made.path, made.request_id) == (b"/generate", b"mine")
    assert made.head_for(b"server:2") == (
        b"POST /generate?a=b HTTP/1.1\r\nHost: server:2\r\nX-Odd: 1\r\n"
        b"X-Request-ID: mine\r\nContent-Length: 7\r\n\r\n"
    )


def test_an_absolute_target_of_the_same_host_becomes_a_path() -> None:
    made = request(HOST, target=b"http://ROUTER:1/generate?a=b")

    assert examine(made, "1.1", LIMITS) is None
    assert (made.target, made.path) == (b"/generate?a=b", b"/generate")


@pytest.mark.parametrize(
    ("made", "version", "http_status"),
    [
        (request(HOST), "2.0", 505),
        (request(HOST), "0.9", 400),
        (request(), "1.1", 400),
        (request(HOST, HOST), "1.1", 400),
        (request((b"Host", b"a/b")), "1.1", 400),
        (request((b"Host", b"a, b")), "1.1", 400),
        (request(HOST, *[(b"A", b"b")] * 7), "1.1", 431),
        (request(HOST, (b"Transfer-Encoding", b"gzip, chunked")), "1.1", 400),
        (request(HOST, *[(b"Transfer-Encoding", b"chunked")] * 2), "1.1", 400),
        (request(HOST, (b"Transfer-Encoding", b"chunked")), "1.0", 400),
        (request(HOST, (b"Content-Length", b"1"), (b"content-length", b"1")), "1.1", 400),
        (request(HOST, (b"Content-Length", b"0" * 5000)), "1.1", 400),
        (request(HOST, (b"Content-Length", b"101")), "1.1", 413),
        (request(HOST, (b"Expect", b"more")), "1.1", 417),
        (request(HOST, (b"X-Request-Id", b"a"), (b"x-request-id", b"b")), "1.1", 400),
        (request(HOST, target=b"http://other/generate"), "1.1", 400),
        (request(HOST, target=b"*"), "1.1", 400),
        (request(HOST, target=b"router:1"), "1.1", 400),
        (request(HOST, target=b"/generate#part"), "1.1", 400),
    ],
)
def test_a_request_that_can_be_understood_in_two_ways_is_refused(
    made: Request, version: str, http_status: int
) -> None:
    refusal = examine(made, version, LIMITS)

    assert refusal is not None
    assert refusal.http_status == http_status


def test_a_length_and_chunks_together_are_refused_though_the_parser_does_so_too() -> None:
    made = request(HOST, (b"Content-Length", b"1"), (b"Transfer-Encoding", b"chunked"))

    refusal = examine(made, "1.1", LIMITS)

    assert refusal is not None and refusal.http_status == 400


def test_http_1_0_needs_no_host() -> None:
    made = request()

    assert examine(made, "1.0", LIMITS) is None
    assert made.is_http_10
