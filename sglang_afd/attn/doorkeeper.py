"""What an attention server answers before SGLang sees the request: status, 503, refusals."""

from __future__ import annotations

import threading
import time
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_afd import __version__
from sglang_afd.attn.facts import told_state
from sglang_afd.attn.open_requests import OpenRequests
from sglang_afd.attn.status import LinkState, StatusBoard
from sglang_afd.protocol.paths import REGISTRATION_PATH, STATUS_PATH
from sglang_afd.registrar.registrar import DRAINING, Registrar
from sglang_afd.upstream.versions import check_version

_PROBE = "/health_generate"  # asks whether a request would be answered now; is never held

# Paths whose answer needs the MLP servers; held while these are away for a short time only.
_NEEDS_EXPERTS = frozenset(
    {
        "/api/chat",
        "/api/generate",
        "/generate",
        "/vertex_generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/encode",
        "/invocations",
        "/classify",
        "/v1/audio/transcriptions",
        "/v1/classify",
        "/v1/responses",
        "/v1/messages",
    }
)

# Endpoints that would change this half of the model and leave the experts as they are.
_CHANGES_WEIGHTS = ("/update_weights", "/init_weights_update_group", "/load_lora_adapter")


def _describe(board: StatusBoard, registrar: Registrar, *, is_warm: bool) -> dict[str, Any]:
    now_s = time.monotonic()
    status = board.read().at(now_s)
    state, reason = told_state(status, is_warm=is_warm)
    is_stalled = state is LinkState.STALLED
    is_draining = registrar.is_draining and state is LinkState.READY
    return {
        "role": "attn",
        "state": DRAINING if is_draining else state,
        "reason": reason,
        "router": registrar.status(),
        "epoch": status.epoch,
        "mlp": list(status.ranks),
        "stalled_for_s": round(now_s - status.stalled_since_s, 3) if is_stalled else None,
        "gives_up_in_s": round(status.held_until_s - now_s, 3) if is_stalled else None,
        "num_attaches": status.num_attaches,
        "num_losses": status.num_losses,
        "num_retracted_requests": status.num_retracted_requests,
        "num_failed_requests": status.num_failed_requests,
        **_describe_steps(board.steps()),
        "weights": status.weights,
        "memory": status.memory,
        "versions": {"sglang_afd": __version__, "sglang": check_version()},
    }


def _describe_steps(by_number: dict[str, int]) -> dict[str, Any]:
    num_steps = sum(by_number.values())
    return {
        "num_steps": num_steps,
        "num_split_steps": num_steps - by_number["1"],
        "steps_by_num_micro_batches": by_number,
    }


class Doorkeeper:
    """ASGI middleware before all of SGLang's: answers the status, and 503 while detached.

    While stalled, requests go on to SGLang, whose scheduler holds them.

    Outside SGLang's API-key check, so that a router needs no key to see who can serve.

    Args:
        app: SGLang's.
        board: Of the scheduler process.
        registrar: Starts when the server begins to listen.
        open_requests: Counted here.
        is_warm: Has the warm-up request been answered?
        is_stopping: Set when the server stops listening.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        board: StatusBoard,
        registrar: Registrar,
        open_requests: OpenRequests,
        is_warm: threading.Event,
        is_stopping: threading.Event,
    ) -> None:
        self._app = app
        self._board = board
        self._registrar = registrar
        self._open_requests = open_requests
        self._is_warm = is_warm
        self._is_stopping = is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, self._watching(receive), send)
            return
        answer = self._answer(scope["path"]) if scope["type"] == "http" else None
        if answer is not None:
            await answer(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] in _NEEDS_EXPERTS:
            with self._open_requests.one():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _watching(self, receive: Receive) -> Receive:
        async def receive_and_look() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._registrar.start()
            if message["type"] == "lifespan.shutdown":
                self._is_stopping.set()  # SGLang is about to wait for the warm-up's thread
            return message

        return receive_and_look

    def _answer(self, path: str) -> Response | None:
        if path == STATUS_PATH:
            is_warm = self._is_warm.is_set()
            return JSONResponse(_describe(self._board, self._registrar, is_warm=is_warm))
        if path == REGISTRATION_PATH:
            return self._registration()
        if path.startswith(_CHANGES_WEIGHTS):
            return _half_a_model(path)
        if path == _PROBE:
            return self._unless(LinkState.READY)
        if path in _NEEDS_EXPERTS:
            return self._unless(LinkState.READY, LinkState.STALLED)
        return None

    def _registration(self) -> Response:
        body = self._registrar.registration()
        if body is None:
            return _error(503, "service_unavailable", "the scheduler is not there yet")
        return Response(body, media_type="application/json")

    def _unless(self, *states: LinkState) -> JSONResponse | None:
        status = self._board.read().at(time.monotonic())
        return None if status.state in states else _unavailable(status.reason)


def _unavailable(reason: str) -> JSONResponse:
    message = f"the MLP servers are away ({reason}); try again shortly, see {STATUS_PATH}"
    return _error(503, "service_unavailable", message, {"Retry-After": "1"})


def _half_a_model(path: str) -> JSONResponse:
    message = (
        f"{path} is not supported with --role attn: it would change attention and leave the "
        f"experts on the MLP servers as they are; restart both roles with the new checkpoint"
    )
    return _error(400, "invalid_request_error", message)


def _error(
    code: int, kind: str, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    error = {"message": message, "type": kind, "code": code}
    return JSONResponse({"error": error}, status_code=code, headers=headers)
