"""Start an attention server: SGLang's own, with our scheduler entry point and our status."""

from __future__ import annotations

import functools
import os
import threading

from sglang_afd.attn.doorkeeper import Doorkeeper
from sglang_afd.attn.scheduler import run_attn_scheduler
from sglang_afd.attn.status import StatusBoard
from sglang_afd.attn.warm_up import warm_up
from sglang_afd.config import AfdConfig
from sglang_afd.protocol import auth
from sglang_afd.trace import file as trace_file
from sglang_afd.upstream import http_server
from sglang_afd.upstream.server_args import ServerArgs


def serve(config: AfdConfig, server_args: ServerArgs) -> int:
    """Serve until SGLang's server ends; returns the exit code."""
    secret = auth.load_secret(config.secret_file)
    for url in config.mlp_urls:
        auth.require_secret_beyond_loopback(url, secret, "--afd-mlp")
    if config.trace_file:
        trace_file.check(config.trace_file)
    board = StatusBoard()
    is_warm, is_stopping = threading.Event(), threading.Event()
    http_server.add_outermost_middleware(
        functools.partial(Doorkeeper, board=board, is_warm=is_warm, is_stopping=is_stopping),
        has_api_key=bool(server_args.api_key or server_args.admin_api_key),
    )
    try:
        http_server.launch_server(
            server_args,
            run_scheduler_process_func=functools.partial(run_attn_scheduler, config, board),
            execute_warmup_func=functools.partial(warm_up, board, is_stopping),
            launch_callback=is_warm.set,
        )
    finally:
        http_server.kill_process_tree(os.getpid(), include_parent=False)
    return 0
