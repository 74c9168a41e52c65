"""Start an attention server: SGLang's own, with our scheduler entry point and our status."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

from sglang_afd.attn.doorkeeper import Doorkeeper
from sglang_afd.attn.facts import AttnFacts, Name
from sglang_afd.attn.open_requests import OpenRequests
from sglang_afd.attn.scheduler import run_attn_scheduler
from sglang_afd.attn.status import StatusBoard
from sglang_afd.attn.warm_up import warm_up
from sglang_afd.config import AfdConfig
from sglang_afd.errors import ConfigError
from sglang_afd.protocol import auth
from sglang_afd.protocol.registration import MAX_NAME_CHARS
from sglang_afd.registrar.address import advertised_url, server_id, with_ports
from sglang_afd.registrar.drain import Drain
from sglang_afd.registrar.registrar import Registrar
from sglang_afd.trace import file as trace_file
from sglang_afd.upstream import http_server
from sglang_afd.upstream.server_args import ServerArgs


def serve(config: AfdConfig, server_args: ServerArgs) -> int:
    """Serve until SGLang's server ends; returns the exit code."""
    secret = auth.load_secret(config.secret_file)
    for url in config.mlp_urls:
        auth.require_secret_beyond_loopback(url, secret, "--afd-mlp")
    for url in config.router_urls:
        auth.require_secret_beyond_loopback(url, secret, "--afd-router")
    if config.trace_file:
        trace_file.check(config.trace_file)
    board = StatusBoard()
    is_warm, is_stopping = threading.Event(), threading.Event()
    open_requests = OpenRequests()
    registrar = Registrar(
        AttnFacts(_name(config, server_args), board, is_warm, open_requests.count),
        urls=config.router_urls,
        secret=secret,
        told=board.told,
    )
    http_server.add_outermost_middleware(
        functools.partial(
            Doorkeeper,
            board=board,
            registrar=registrar,
            open_requests=open_requests,
            is_warm=is_warm,
            is_stopping=is_stopping,
        ),
        has_api_key=bool(server_args.api_key or server_args.admin_api_key),
    )
    ending = Ending(registrar, open_requests, config.drain_timeout_s if config.router_url else 0.0)
    http_server.before_sigterm(ending.begin)
    try:
        http_server.launch_server(
            server_args,
            run_scheduler_process_func=functools.partial(run_attn_scheduler, config, board),
            execute_warmup_func=functools.partial(warm_up, board, is_stopping),
            launch_callback=is_warm.set,
        )
    finally:
        registrar.stop()
        http_server.kill_process_tree(os.getpid(), include_parent=False)
    return 0


class Ending:
    """From SIGTERM on: drain, leave, then what SGLang does.

    Args:
        registrar: Tells the router.
        open_requests: That are to end first.
        timeout_s: They are waited for no longer; SGLang waits for them on its own.
    """

    def __init__(self, registrar: Registrar, open_requests: OpenRequests, timeout_s: float) -> None:
        self._registrar = registrar
        self._open_requests = open_requests
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None

    def begin(self, end: Callable[[], None]) -> None:
        """Returns at once; a second signal changes nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(end,), daemon=True)
            self._thread.start()

    def _run(self, end: Callable[[], None]) -> None:
        def is_idle() -> bool:
            return self._open_requests.count() == 0

        Drain(self._registrar, is_idle, self._timeout_s).wait()
        self._registrar.stop()
        end()


def _name(config: AfdConfig, server_args: ServerArgs) -> Name:
    model = server_args.served_model_name
    if len(model) > MAX_NAME_CHARS:
        raise ConfigError(
            f"the model's name has {len(model)} characters, more than {MAX_NAME_CHARS}: {model}; "
            f"give it a shorter one with --served-model-name"
        )
    scheme = "https" if server_args.ssl_certfile else "http"
    url = advertised_url(config, host=server_args.host, port=server_args.port, scheme=scheme)
    return Name(
        server_id=server_id(config, url),
        models=(model,),
        url=url,
        peer_urls=with_ports(config.mlp_urls),
    )
