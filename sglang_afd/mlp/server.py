"""Start one MLP rank: load its experts, open the exchange, serve HTTP beside it."""

from __future__ import annotations

import logging
import multiprocessing
import secrets
import signal
import socket
import time
from typing import Any

import torch

from sglang_afd import __version__
from sglang_afd.config import AfdConfig
from sglang_afd.errors import AfdError, ConfigError
from sglang_afd.mlp import http
from sglang_afd.mlp.board import Board
from sglang_afd.mlp.experts import Experts
from sglang_afd.mlp.group import MemberReport
from sglang_afd.mlp.loop import Loop
from sglang_afd.mlp.private_address import private_ipc_address
from sglang_afd.protocol import auth
from sglang_afd.protocol.handshake import Gate, MlpIdentity
from sglang_afd.protocol.messages import ModelSpec
from sglang_afd.transport.zmq_hub import ZmqHub
from sglang_afd.upstream.server_args import ServerArgs, model_fingerprint
from sglang_afd.upstream.versions import check_version

logger = logging.getLogger(__name__)

CHILD_CHECK_S = 1.0


def serve(config: AfdConfig, server_args: ServerArgs, *, ep_size: int) -> int:
    """Serve one rank until SIGTERM or SIGINT; returns the exit code."""
    secret = auth.load_secret(config.secret_file)
    listen = config.listen or private_ipc_address()
    auth.require_secret_beyond_loopback(listen, secret, "--afd-listen")
    if config.leader_url:
        auth.require_secret_beyond_loopback(config.leader_url, secret, "--afd-leader")
    listener = _bind(server_args.host, server_args.port)
    stop = _StopFlag()
    rank = max(config.ep_rank, 0)
    started_s = time.monotonic()
    print_of_model = model_fingerprint(server_args)  # before the load, since it finds broken shards
    experts = Experts(server_args, rank=rank, ep_size=ep_size)
    identity = _identity(config, print_of_model, experts)
    hub = ZmqHub(
        Gate(identity, secret, max_peers=config.max_peers),
        listen,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
    )
    board = Board(experts.shard.num_local)
    options = http.HttpOptions(
        info=_info(server_args, identity, experts, hub.address),
        report=MemberReport(
            rank=rank,
            ep_size=ep_size,
            boot_id=identity.boot_id,
            fingerprint=identity.spec.fingerprint,
            exchange_address=hub.address,
            sent_at_s=0.0,
        ),
        leader_url=config.leader_url,
        secret=secret,
    )
    child = multiprocessing.get_context("spawn").Process(
        target=http.serve, args=(listener, board, options), name="mlp-http", daemon=True
    )
    child.start()
    listener.close()
    logger.info(
        "MLP rank %d of %d serves experts %d to %d of %s: exchange %s, HTTP port %d, %.1f s",
        rank,
        ep_size,
        experts.shard.first,
        experts.shard.stop - 1,
        experts.architecture,
        hub.address,
        server_args.port,
        time.monotonic() - started_s,
    )
    return _run(Loop(hub, experts, board, stop), hub, child, stop)


class _StopFlag:
    """Asked by the loop at every turn: a signal came, or the HTTP process died."""

    def __init__(self) -> None:
        self._is_set = False
        self._child: Any = None
        self._next_check_s = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def watch(self, child: Any) -> None:
        self._child = child

    def __call__(self) -> bool:
        now_s = time.monotonic()
        if self._child is not None and now_s >= self._next_check_s:
            self._next_check_s = now_s + CHILD_CHECK_S
            if not self._child.is_alive():
                raise AfdError(f"the HTTP process ended with exit code {self._child.exitcode}")
        return self._is_set

    def _on_signal(self, number: int, frame: object) -> None:
        if self._child is None:
            raise SystemExit(128 + number)  # still loading
        self._is_set = True


def _run(loop: Loop, hub: ZmqHub, child: Any, stop: _StopFlag) -> int:
    stop.watch(child)
    try:
        loop.run()
    finally:
        hub.close()
        child.terminate()
        child.join(5)
    return 0


def _identity(config: AfdConfig, print_of_model: str, experts: Experts) -> MlpIdentity:
    return MlpIdentity(
        spec=ModelSpec(
            package_version=__version__,
            sglang_version=check_version(),
            fingerprint=print_of_model,
            architecture=experts.architecture,
            dtype=str(experts.dtype).removeprefix("torch."),
            hidden_size=experts.hidden_size,
            top_k=experts.top_k,
            num_experts=experts.shard.num_experts,
            moe_layer_ids=tuple(sorted(experts.layers)),
            max_rows=config.max_rows,
        ),
        rank=experts.shard.rank,
        ep_size=experts.shard.ep_size,
        first_expert=experts.shard.first,
        stop_expert=experts.shard.stop,
        boot_id=secrets.token_hex(8),
    )


def _info(
    server_args: ServerArgs, identity: MlpIdentity, experts: Experts, address: str
) -> dict[str, Any]:
    spec = identity.spec
    return {
        "role": "mlp",
        "model_path": server_args.model_path,
        "architecture": spec.architecture,
        "fingerprint": spec.fingerprint,
        "moe_layer_ids": list(spec.moe_layer_ids),
        "num_experts": spec.num_experts,
        "first_expert": identity.first_expert,
        "stop_expert": identity.stop_expert,
        "ep_rank": identity.rank,
        "ep_size": identity.ep_size,
        "dtype": spec.dtype,
        "device": server_args.device,
        "max_rows": spec.max_rows,
        "boot_id": identity.boot_id,
        "exchange_address": address,
        "versions": {
            "sglang_afd": spec.package_version,
            "sglang": spec.sglang_version,
            "torch": torch.__version__,
        },
        "weights": {
            "num_tensors_read": experts.read_count.num_tensors,
            "num_expert_tensors_read": experts.read_count.num_expert_tensors,
            "num_tensors_skipped": experts.read_count.num_skipped,
            "num_bytes_read": experts.read_count.num_bytes,
        },
    }


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {error}; choose another"
        ) from None
    return listener
