from __future__ import annotations

from multidict import CIMultiDict

from sgl_router_afd.headers import request_headers, response_headers


def test_end_to_end_headers_keep_their_spelling_order_and_repetitions() -> None:
    received = CIMultiDict([("set-cookie", "a"), ("X-Odd", " b "), ("Set-Cookie", "c")])

    assert list(response_headers(received).items()) == list(received.items())


def test_hop_by_hop_headers_and_those_named_by_connection_are_dropped() -> None:
    received = CIMultiDict(
        [("Connection", "close, X-One"), ("connection", "x-two"), ("X-One", "1"), ("X-Two", "2")]
        + [("Transfer-Encoding", "chunked"), ("Keep-Alive", "5"), ("Upgrade", "h2c"), ("A", "b")]
    )

    assert list(response_headers(received).items()) == [("A", "b")]


def test_only_a_request_leaves_host_length_and_expect_to_the_client_library() -> None:
    received = CIMultiDict({"Host": "a", "Content-Length": "1", "Expect": "100-continue"})

    assert not request_headers(received)
    assert response_headers(received)["Content-Length"] == "1"
