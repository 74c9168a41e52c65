"""Bodies in and out: bounded, strict, and every error in OpenAI's form."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from sgl_router_afd.replies import COME_BACK, RETRY_AFTER_S, error_body
from sglang_afd.errors import AfdError

logger = logging.getLogger(__name__)

JSON = "application/json"
T = TypeVar("T")


class ApiError(AfdError):
    """A request that cannot be answered.

    Args:
        http_status: 4xx or 5xx.
        message: What was wrong and what to do, for people.
        headers: More header fields.
    """

    def __init__(
        self, http_status: int, message: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.headers = headers or {}


def json_answer(
    payload: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(payload), status=status, content_type=JSON, headers=headers
    )


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """The body, of which no more is held than is allowed.

    Raises:
        ApiError: It is longer.
    """
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > max_bytes:
            raise ApiError(413, f"the body is longer than {max_bytes} bytes; send a shorter one")
    return bytes(body)


def decode(body: bytes, kind: type[T]) -> T:
    """A body as the struct that it should be.

    Raises:
        ApiError: It is something else.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            400, f"the body is not what this path takes: {error}; see GET /openapi.json"
        ) from None


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong, one JSON object says what it was."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error_answer(error.http_status, str(error), error.headers)
    except web.HTTPNotFound:
        return _error_answer(404, f"there is no {request.path} here; see GET /openapi.json")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {request.method}"
        return _error_answer(405, message, {"Allow": allowed})
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error_answer(error.status, error.reason)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return _error_answer(500, "the router failed at this; its log has the details")


def _error_answer(status: int, message: str, headers: dict[str, Any] | None = None) -> web.Response:
    headers = dict(headers or {})
    if status in COME_BACK:
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return web.Response(
        body=error_body(status, message), status=status, content_type=JSON, headers=headers
    )
