"""What a server's answer to `GET /afd/v1/status` says about sending it traffic (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from sgl_router_afd.endpoints import STATUS

ROLE_WITH_TRAFFIC = "attn"


class ServerState(StrEnum):
    """READY gets traffic; requests wait for STALLED to pass; the first four are its own words."""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"  # it holds requests until its MLP servers are back
    DETACHED = "detached"
    UNKNOWN = "unknown"  # not polled yet
    UNREACHABLE = "unreachable"  # no connection, or no answer in time
    UNSUITABLE = "unsuitable"  # it answers, but not as an attention server


OWN_STATES = {state.value: state for state in list(ServerState)[:4]}
KEEPS_THROUGH_SILENCE = (ServerState.READY, ServerState.STALLED)
HOLDS_REQUESTS = (ServerState.STALLED,)  # a request can wait for what comes after it


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The state to record for a server, and the sentence that explains it."""

    state: ServerState
    reason: str


class StatusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a server's status that routing reads; servers may send more."""

    role: str
    state: str = ""
    reason: str = ""


def judge(http_status: int, body: bytes) -> Verdict:
    """Turn one answer into a verdict; never raises, whatever the server sent."""
    if http_status == 404:
        return _unsuitable(
            f"not an sglang-afd attention server: it has no {STATUS}; "
            "start it with python -m sglang_afd.launch_server --role attn"
        )
    if http_status != 200:
        return _unsuitable(f"GET {STATUS} answered {http_status}, wanted 200")
    try:
        answer = msgspec.json.decode(body, type=StatusAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return _unsuitable(f"GET {STATUS} answered something else than a status: {error}")
    if answer.role != ROLE_WITH_TRAFFIC:
        return _unsuitable(
            f"its role is {answer.role!r} and only {ROLE_WITH_TRAFFIC!r} servers get requests; "
            "give --attn the URL of an attention server instead"
        )
    if answer.state not in OWN_STATES:
        return _unsuitable(
            f"it reports state {answer.state!r}, this router knows {', '.join(OWN_STATES)}; "
            "use the same sglang-afd version on both"
        )
    return Verdict(state=OWN_STATES[answer.state], reason=answer.reason)


def _unsuitable(reason: str) -> Verdict:
    return Verdict(state=ServerState.UNSUITABLE, reason=reason)
