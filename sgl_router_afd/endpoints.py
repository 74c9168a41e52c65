"""The endpoints: the router's own, and those that it relays.

Relayed is only what any one server can answer alone. An endpoint that changes a server, or asks for
something that an earlier request left on one, must be sent to that server itself.
"""

from __future__ import annotations

from sglang_afd.protocol.paths import STATUS_PATH as STATUS

__all__ = ["HEALTH", "RELAYED", "RELAYED_GET", "RELAYED_POST", "STATUS"]

HEALTH = "/health"

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
RELAYED_GET = ("/v1/models", "/v1/models/{model:.+}", "/model_info", "/get_model_info")
RELAYED = tuple(path.replace(":.+", "") for path in RELAYED_POST + RELAYED_GET)
