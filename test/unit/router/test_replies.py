from __future__ import annotations

import json

from sgl_router_afd.replies import error_event, error_reply


def test_a_503_is_an_openai_error_that_says_when_to_come_back() -> None:
    reply = error_reply(503, "no server")

    assert isinstance(reply.body, bytes)
    assert json.loads(reply.body) == {
        "error": {"message": "no server", "type": "service_unavailable", "code": 503}
    }
    assert reply.content_type == "application/json"
    assert reply.headers["Retry-After"] == "1"


def test_other_errors_do_not_ask_for_a_retry() -> None:
    assert "Retry-After" not in error_reply(502, "gone").headers


def test_an_error_event_is_one_event_even_behind_half_a_line() -> None:
    stream = b"data: {" + error_event(502, "two\nlines")

    broken, event, rest = stream.split(b"\n\n")
    assert (broken, rest) == (b"data: {", b"")
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "two\nlines"
