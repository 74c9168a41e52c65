from __future__ import annotations

from sgl_router_afd.dataplane.headers import request_lines, response_lines


def test_end_to_end_fields_keep_their_spelling_order_and_repetitions() -> None:
    received = [(b"set-cookie", b"a"), (b"X-Odd", b"b\xff "), (b"Set-Cookie", b"c"), (b"X", b"")]

    lines = response_lines(received, None)

    assert b"".join(lines) == b"set-cookie: a\r\nX-Odd: b\xff \r\nSet-Cookie: c\r\nX: \r\n"


def test_hop_by_hop_fields_and_those_named_by_connection_are_dropped() -> None:
    received = [(b"Connection", b"close, X-One"), (b"X-One", b"1"), (b"X-TWO", b"2"), (b"A", b"b")]
    received += [(b"Transfer-Encoding", b"chunked"), (b"Keep-Alive", b"5"), (b"Upgrade", b"h2c")]

    lines = response_lines(received, b"close, X-One,x-two")

    assert lines == [b"A: b\r\n"]


def test_only_a_request_leaves_host_length_and_expect_to_be_written_anew() -> None:
    received = [(b"Host", b"a"), (b"Content-Length", b"1"), (b"Expect", b"100-continue")]

    assert request_lines(received, None) == []
    assert b"Content-Length: 1\r\n" in response_lines(received, None)


def test_connection_cannot_take_the_length_of_an_answer_away() -> None:
    received = [(b"Content-Length", b"1")]

    assert response_lines(received, b"content-length") == [b"Content-Length: 1\r\n"]
