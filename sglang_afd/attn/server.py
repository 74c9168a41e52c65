"""Start an attention server: SGLang's own, with our scheduler entry point and our status."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_afd import __version__
from sglang_afd.attn.scheduler import run_attn_scheduler
from sglang_afd.attn.status import LinkState, StatusBoard
from sglang_afd.config import AfdConfig
from sglang_afd.protocol import auth
from sglang_afd.upstream import http_server
from sglang_afd.upstream.server_args import ServerArgs
from sglang_afd.upstream.versions import check_version

STATUS_PATH = "/afd/v1/status"
ATTACH_POLL_S = 0.1

# Paths whose answer needs the MLP servers; while they are away, 503 at once.
_NEEDS_EXPERTS = frozenset(
    {
        "/generate",
        "/health_generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/encode",
        "/classify",
        "/v1/responses",
        "/v1/messages",
    }
)


def serve(config: AfdConfig, server_args: ServerArgs) -> int:
    """Serve until SGLang's server ends; returns the exit code."""
    secret = auth.load_secret(config.secret_file)
    auth.require_secret_beyond_loopback(config.mlp_url, secret, "--afd-mlp")
    board = StatusBoard()
    is_warm = threading.Event()
    http_server.add_outermost_middleware(
        functools.partial(_Doorkeeper, board=board, is_warm=is_warm),
        has_api_key=bool(server_args.api_key or server_args.admin_api_key),
    )
    try:
        http_server.launch_server(
            server_args,
            run_scheduler_process_func=functools.partial(run_attn_scheduler, config, board),
            execute_warmup_func=functools.partial(_warm_up, board),
            launch_callback=is_warm.set,
        )
    finally:
        http_server.kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _warm_up(board: StatusBoard, server_args: ServerArgs) -> bool:
    """SGLang's warm-up request, once the MLP servers are there to answer it."""
    while board.read().state is not LinkState.READY:
        time.sleep(ATTACH_POLL_S)
    return bool(http_server.execute_server_warmup(server_args))


def _describe(board: StatusBoard, *, is_warm: bool) -> dict[str, Any]:
    status = board.read()
    state, reason = status.state, status.reason
    if state is LinkState.READY and not is_warm:
        state, reason = LinkState.STARTING, "the warm-up request is running"
    elif state is LinkState.STARTING and not reason:
        reason = "waiting for the MLP servers"
    return {
        "role": "attn",
        "state": state,
        "reason": reason,
        "epoch": status.epoch,
        "mlp": list(status.ranks),
        "num_attaches": status.num_attaches,
        "num_losses": status.num_losses,
        "num_failed_requests": status.num_failed_requests,
        "weights": status.weights,
        "versions": {"sglang_afd": __version__, "sglang": check_version()},
    }


class _Doorkeeper:
    """ASGI middleware before all of SGLang's: answers the status, and 503 while detached.

    Outside SGLang's API-key check, so that a router needs no key to see who can serve.
    """

    def __init__(self, app: ASGIApp, *, board: StatusBoard, is_warm: threading.Event) -> None:
        self._app = app
        self._board = board
        self._is_warm = is_warm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer(scope["path"]) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    def _answer(self, path: str) -> JSONResponse | None:
        if path == STATUS_PATH:
            return JSONResponse(_describe(self._board, is_warm=self._is_warm.is_set()))
        if path in _NEEDS_EXPERTS:
            status = self._board.read()
            if status.state is not LinkState.READY:
                return _unavailable(status.reason)
        return None


def _unavailable(reason: str) -> JSONResponse:
    message = f"the MLP servers are away ({reason}); try again shortly, see {STATUS_PATH}"
    error = {"message": message, "type": "service_unavailable", "code": 503}
    return JSONResponse({"error": error}, status_code=503, headers={"Retry-After": "1"})
