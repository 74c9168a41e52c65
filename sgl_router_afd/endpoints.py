"""The endpoints: the router's own, those that it relays, those that nobody serves here (pure).

Relayed is only what any one server can answer alone. An endpoint that changes a server, or asks for
something that an earlier request left on one, must be sent to that server itself.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from sglang_afd.protocol.paths import STATUS_PATH as STATUS

__all__ = ["HEALTH", "METRICS", "OWN", "RELAYED", "STATUS", "Endpoint", "Target", "find"]

HEALTH = "/health"
METRICS = "/metrics"
PAGE = "/"
OWN = (PAGE, HEALTH, "/readiness", METRICS, "/openapi.json", STATUS)
OWN_TREES = ("/afd/v1", "/workers")  # and all below

RESPONSES = "/v1/responses"
RELAYED_POST = (
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    RESPONSES,
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/score",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/invocations",
    "/vertex_generate",
    "/api/chat",
    "/api/generate",
    "/api/show",
)
MODELS = "/v1/models"
RELAYED_GET = (MODELS, "/model_info", "/get_model_info", "/api/tags")
MODEL = "/v1/models/"  # and a model's name, slashes included
RELAYED = (*RELAYED_POST, *RELAYED_GET, MODEL + "{model}")

# SGLang has these for models of other kinds. 400 is what its servers answer, too; a client that
# gets 5xx or 404 tries again or doubts its base URL.
OTHER_KINDS = {
    "/v1/embeddings": "embedding",
    "/encode": "embedding",
    "/v1/rerank": "reranking",
    "/rerank": "reranking",
    "/classify": "classifying",
    "/v1/classify": "classifying",
    "/v1/audio/transcriptions": "speech",
    "/v1/audio/translations": "speech",
    "/v1/audio/speech": "speech",
    "/v1/realtime": "speech",
    "/v1/images/generations": "image",
    "/v1/images/edits": "image",
    "/v1/images/variations": "image",
    "/v1/moderations": "moderation",
}

POST = (b"POST",)
GET = (b"GET", b"HEAD")
ANY = (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS")


class Target(Enum):
    """Who answers a request."""

    SERVER = auto()  # one of the model that its body names
    MODEL = auto()  # one of the model that its path names
    MODELS = auto()  # a server while one model is served, the control process when there are more
    CONTROL = auto()
    NOBODY = auto()  # it is known, and cannot be served


class Endpoint(NamedTuple):
    """What becomes of a path."""

    target: Target
    methods: tuple[bytes, ...]
    http_status: int = 200  # of the refusal where nobody answers
    why: str = ""  # the same


def _other_kind(path: str, kind: str) -> Endpoint:
    why = (
        f"{path} needs {kind} models, and this router serves text generation by mixture-of-experts "
        "decoders alone; send it to a server of such a model"
    )
    return Endpoint(Target.NOBODY, ANY, 400, why)


_STORED = Endpoint(
    Target.NOBODY,
    ANY,
    404,
    f"a response is kept by the server that made it, and by no other: POST {RESPONSES} is relayed, "
    "what asks for an earlier response is not; keep the answers and send the whole conversation",
)
_OWN = Endpoint(Target.CONTROL, ANY)  # the control process knows the methods of each
_OF_MODEL = Endpoint(Target.MODEL, GET)
_EXACT: dict[bytes, Endpoint] = {
    **{path.encode(): Endpoint(Target.SERVER, POST) for path in RELAYED_POST},
    **{path.encode(): Endpoint(Target.SERVER, GET) for path in RELAYED_GET},
    **{path.encode(): _other_kind(path, kind) for path, kind in OTHER_KINDS.items()},
    **{path.encode(): _OWN for path in (*OWN, *OWN_TREES)},
    MODELS.encode(): Endpoint(Target.MODELS, GET),
}
_TREES = (
    (MODEL.encode(), _OF_MODEL),
    (f"{RESPONSES}/".encode(), _STORED),
    *((f"{tree}/".encode(), _OWN) for tree in OWN_TREES),
)


def find(path: bytes) -> Endpoint | None:
    """What becomes of a path; None for one that nobody knows."""
    found = _EXACT.get(path)
    if found is None:
        for start, endpoint in _TREES:
            if path.startswith(start) and len(path) > len(start):
                return endpoint
    return found
