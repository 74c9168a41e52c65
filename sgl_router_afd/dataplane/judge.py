"""Whether a request can be served here, by its path, key and body; the refusals (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_router_afd.dataplane.body import Said
from sgl_router_afd.dataplane.request import Refusal
from sgl_router_afd.endpoints import RELAYED, RESPONSES, Endpoint
from sgl_router_afd.keys import Key

_RESPONSES = RESPONSES.encode()
MAX_SHOWN_NAME = 200  # characters of a name that a client made up


def judge_path(path: bytes, method: bytes, endpoint: Endpoint | None) -> Refusal | None:
    """Whether anybody answers that."""
    if endpoint is None:
        return Refusal(
            404,
            f"the router has no {_shown(path)}; it relays {', '.join(RELAYED)}; "
            "send anything else to an attention server itself",
        )
    if method not in endpoint.methods:
        allowed = ", ".join(name.decode() for name in endpoint.methods)
        message = f"{_shown(path)} takes {allowed}, got {_shown(method)}"
        return Refusal(405, message, (("Allow", allowed),))
    if endpoint.http_status >= 400:
        return Refusal(endpoint.http_status, endpoint.why, code="unsupported_endpoint")
    return None


def judge_key(key: Key, authorization: bytes) -> Refusal | None:
    """Whether the client knows the key; how long that takes tells nothing of it."""
    if not key:
        return None
    scheme, _, given = authorization.partition(b" ")
    if key.is_equal_to(given.strip()) and scheme.lower() == b"bearer":
        return None
    what = "the API key is wrong" if authorization else "an API key is missing"
    message = f"{what}; send Authorization: Bearer KEY with the key of this router's --api-key"
    return Refusal(401, message, (("WWW-Authenticate", "Bearer"),), code="invalid_api_key")


def judge_body(path: bytes, said: Said) -> Refusal | None:
    """Whether any one server can do what the body asks for."""
    if path != _RESPONSES:
        return None
    if said.previous_response_id is not None:
        return Refusal(
            400,
            "previous_response_id names a response that only the server that made it has, and the "
            "router does not know which that was; leave it out and send the whole conversation as "
            "input",
            code="unsupported_parameter",
            param="previous_response_id",
        )
    if said.background:
        return Refusal(
            400,
            "background: true leaves the response on one server, and the router could not find it "
            "again; leave it out, and set stream: true to get the answer as it is made",
            code="unsupported_parameter",
            param="background",
        )
    return None


def contradiction(field: str) -> Refusal:
    """A body that two readers may understand differently."""
    return Refusal(400, f"the request has two different values of {field}; send one", param=field)


def unknown_model(name: str, models: Iterable[str]) -> Refusal:
    known = ", ".join(sorted(models))
    return Refusal(
        404,
        f"there is no model {name[:MAX_SHOWN_NAME]!r} here; there is {known or 'none'}",
        code="model_not_found",
        param="model",
    )


def no_model(reason: str, num_searched_bytes: int) -> Refusal:
    """A body that had to name a model.

    Args:
        reason: What the control process says of such requests.
        num_searched_bytes: How much of the body was looked at; 0 for all of it.
    """
    if num_searched_bytes:
        reason += (
            f" within its first {num_searched_bytes} bytes: write the field model before what is "
            "large, or start the router with a larger --max-replay-body-bytes"
        )
    return Refusal(400, reason, code="missing_required_parameter", param="model")


def _shown(text: bytes) -> str:
    return text[:MAX_SHOWN_NAME].decode("ascii", "backslashreplace")
