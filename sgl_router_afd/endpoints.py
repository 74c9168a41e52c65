"""The endpoints: the router's own, and those that it relays (pure).

Relayed is only what any one server can answer alone. An endpoint that changes a server, or asks for
something that an earlier request left on one, must be sent to that server itself.
"""

from __future__ import annotations

from enum import Enum, auto

from sglang_afd.protocol.paths import STATUS_PATH as STATUS

__all__ = ["HEALTH", "METRICS", "OWN", "RELAYED", "STATUS", "Target", "find"]

HEALTH = "/health"
METRICS = "/metrics"
OWN = (HEALTH, STATUS, METRICS)

RELAYED_POST = (
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/score",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
)
RELAYED_GET = ("/v1/models", "/model_info", "/get_model_info")
MODEL = "/v1/models/"  # and a model's name, slashes included
RELAYED = (*RELAYED_POST, *RELAYED_GET, MODEL + "{model}")

POST = (b"POST",)
GET = (b"GET", b"HEAD")


class Target(Enum):
    """Who answers a request."""

    SERVER = auto()
    CONTROL = auto()


_EXACT: dict[bytes, tuple[Target, tuple[bytes, ...]]] = {
    **{path.encode(): (Target.CONTROL, GET) for path in OWN},
    **{path.encode(): (Target.SERVER, POST) for path in RELAYED_POST},
    **{path.encode(): (Target.SERVER, GET) for path in RELAYED_GET},
}
_MODEL = MODEL.encode()


def find(path: bytes) -> tuple[Target, tuple[bytes, ...]] | None:
    """Who answers a path, and to which methods; None for a path that nobody answers."""
    found = _EXACT.get(path)
    if found is None and path.startswith(_MODEL) and len(path) > len(_MODEL):
        return (Target.SERVER, GET)
    return found
