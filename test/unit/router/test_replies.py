from __future__ import annotations

import json

import pytest

from sgl_router_afd.replies import error_event, error_reply


@pytest.mark.parametrize(
    ("http_status", "kind"), [(503, "service_unavailable"), (429, "too_many_requests")]
)
def test_a_reply_to_come_back_to_is_an_openai_error_that_says_when(
    http_status: int, kind: str
) -> None:
    head, _, body = error_reply(http_status, "no server").partition(b"\r\n\r\n")

    assert json.loads(body) == {
        "error": {"message": "no server", "type": kind, "code": http_status}
    }
    assert head.startswith(b"HTTP/1.1 %d " % http_status)
    fields = head.split(b"\r\n")[1:]
    assert b"Content-Type: application/json" in fields
    assert b"Content-Length: %d" % len(body) in fields
    assert b"Retry-After: 1" in fields


def test_a_reply_with_a_word_of_openai_names_the_field_that_was_wrong() -> None:
    _, _, body = error_reply(404, "no", code="model_not_found", param="model").partition(
        b"\r\n\r\n"
    )

    assert json.loads(body)["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_other_errors_do_not_ask_for_a_retry() -> None:
    assert b"Retry-After" not in error_reply(502, "gone")


def test_a_reply_says_whether_the_connection_stays() -> None:
    assert b"\r\nConnection: close\r\n" in error_reply(404, "no")
    assert b"Connection" not in error_reply(404, "no", keeps_alive=True)


def test_the_reply_to_a_head_request_tells_the_length_of_the_body_that_it_leaves_out() -> None:
    whole, bare = error_reply(404, "no"), error_reply(404, "no", has_body=False)

    assert whole.startswith(bare)
    assert bare.endswith(b"\r\n\r\n")


def test_an_error_event_is_one_event_even_behind_half_a_line() -> None:
    stream = b"data: {" + error_event(502, "two\nlines")

    broken, event, rest = stream.split(b"\n\n")
    assert (broken, rest) == (b"data: {", b"")
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "two\nlines"
