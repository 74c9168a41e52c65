"""The router's own answers, in the form that OpenAI clients read (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

import msgspec

RETRY_AFTER_S = 1
COME_BACK = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def error_body(http_status: int, message: str, code: str = "", param: str = "") -> bytes:
    """An OpenAI error.

    Args:
        http_status: 4xx or 5xx.
        message: For people.
        code: OpenAI's own word where it has one, e.g. "model_not_found".
        param: With a code: the field of the request that was wrong.
    """
    error: dict[str, object] = {"message": message}
    if code:
        error |= {"type": "invalid_request_error", "param": param or None, "code": code}
    else:
        kind = HTTPStatus(http_status).phrase.lower().replace(" ", "_")
        error |= {"type": kind, "code": http_status}
    return msgspec.json.encode({"error": error})


def error_event(http_status: int, message: str) -> bytes:
    """A server-sent event that ends a broken stream.

    It starts with a blank line because the server may have died inside an event; between two whole
    events a blank line means nothing.
    """
    return b"\n\ndata: " + error_body(http_status, message) + b"\n\n"


def error_reply(
    http_status: int,
    message: str,
    *,
    code: str = "",
    param: str = "",
    headers: Iterable[tuple[str, str]] = (),
    keeps_alive: bool = False,
    has_body: bool = True,
) -> bytes:
    """A whole HTTP response with an OpenAI error; 429 and 503 also say when to come back.

    Args:
        http_status: 4xx or 5xx.
        message: For people.
        code: As of `error_body`.
        param: The same.
        headers: More header fields.
        keeps_alive: Whether the connection takes another request.
        has_body: False for the answer to a HEAD request.
    """
    body = error_body(http_status, message, code, param)
    fields = [
        f"HTTP/1.1 {http_status} {HTTPStatus(http_status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    if http_status in COME_BACK:
        fields.append(f"Retry-After: {RETRY_AFTER_S}")
    if not keeps_alive:
        fields.append("Connection: close")
    head = "\r\n".join(fields).encode() + b"\r\n\r\n"
    return head + body if has_body else head
