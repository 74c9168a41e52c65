"""Start an attention server: SGLang's own, with our scheduler entry point and our status."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any

from fastapi import Request
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
    _add_routes(board, is_warm)
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


def _add_routes(board: StatusBoard, is_warm: threading.Event) -> None:
    async def status(request: Request) -> JSONResponse:
        return JSONResponse(_describe(board, is_warm=is_warm.is_set()))

    http_server.app.add_api_route(STATUS_PATH, status, methods=["GET"])
    http_server.app.add_middleware(_RefuseWhileDetached, board=board, is_warm=is_warm)


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


class _RefuseWhileDetached:
    """ASGI middleware: requests that need the experts are not queued while there are none."""

    def __init__(self, app: ASGIApp, *, board: StatusBoard, is_warm: threading.Event) -> None:
        self._app = app
        self._board = board
        self._is_warm = is_warm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in _NEEDS_EXPERTS:
            status = self._board.read()
            if status.state is not LinkState.READY:
                await _unavailable(status.reason)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _unavailable(reason: str) -> JSONResponse:
    message = f"the MLP servers are away ({reason}); try again shortly, see {STATUS_PATH}"
    error = {"message": message, "type": "service_unavailable", "code": 503}
    return JSONResponse({"error": error}, status_code=503, headers={"Retry-After": "1"})
