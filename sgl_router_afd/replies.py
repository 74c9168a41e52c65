"""The router's own answers, in the form that OpenAI clients read."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from aiohttp import web

RETRY_AFTER_S = 1


def json_reply(payload: object, *, http_status: int = 200) -> web.Response:
    return web.Response(
        status=http_status, body=msgspec.json.encode(payload), content_type="application/json"
    )


def error_reply(http_status: int, message: str) -> web.Response:
    """An OpenAI error body; 503 also says when to come back."""
    reply = json_reply(_error(http_status, message), http_status=http_status)
    if http_status == HTTPStatus.SERVICE_UNAVAILABLE:
        reply.headers["Retry-After"] = str(RETRY_AFTER_S)
    return reply


def error_event(http_status: int, message: str) -> bytes:
    """A server-sent event that ends a broken stream.

    It starts with a blank line because the server may have died inside an event; between two whole
    events a blank line means nothing.
    """
    return b"\n\ndata: " + msgspec.json.encode(_error(http_status, message)) + b"\n\n"


def _error(http_status: int, message: str) -> dict[str, object]:
    kind = HTTPStatus(http_status).phrase.lower().replace(" ", "_")
    return {"error": {"message": message, "type": kind, "code": http_status}}
