"""SGLang's HTTP server: its launcher and its application."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.http_server import app, launch_server
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils import kill_process_tree
from starlette.types import ASGIApp

from sglang_afd.upstream import hooks

API_KEY_HOOK = "sglang.srt.utils.auth.add_api_key_middleware"
SIGTERM_HOOK = "sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler"

__all__ = [
    "API_KEY_HOOK",
    "SIGTERM_HOOK",
    "add_outermost_middleware",
    "before_sigterm",
    "kill_process_tree",
    "launch_server",
    "mark_up",
]


def add_outermost_middleware(
    middleware: Callable[[ASGIApp], ASGIApp], *, has_api_key: bool
) -> None:
    """Put `middleware` before everything that SGLang adds to its application.

    Args:
        middleware: Takes the application that it wraps.
        has_api_key: SGLang will add its own check of the key, which must end up inside ours.
    """
    if not has_api_key:
        app.add_middleware(middleware)
        return

    def add_both(add_api_key_middleware: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        add_api_key_middleware(*args, **kwargs)
        app.add_middleware(middleware)

    hooks.install([hooks.Hook(target=API_KEY_HOOK, type=hooks.AROUND, function=add_both)])


def before_sigterm(prepare: Callable[[Callable[[], None]], None]) -> None:
    """Have SIGTERM call `prepare`, with what SGLang does on it; that may be called by any thread.

    It takes effect with SGLang's own handler, which is installed when the first request comes.
    """

    def around(sigterm_handler: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        prepare(functools.partial(sigterm_handler, *args, **kwargs))

    hooks.install([hooks.Hook(target=SIGTERM_HOOK, type=hooks.AROUND, function=around)])


def mark_up() -> None:
    """Tell SGLang's health endpoints that the warm-up worked, as its own warm-up does."""
    http_server._global_state.tokenizer_manager.server_status = ServerStatus.Up
