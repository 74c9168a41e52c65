"""Start one MLP rank, or a spare of one: HTTP first, then the experts, then the exchange."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sglang_afd import __version__
from sglang_afd.config import FP8, AfdConfig, Transport, choose_transport, has_rounds
from sglang_afd.errors import ConfigError
from sglang_afd.mlp import http
from sglang_afd.mlp.board import Board
from sglang_afd.mlp.device_watch import DeviceFailed
from sglang_afd.mlp.experts import Experts
from sglang_afd.mlp.facts import Name
from sglang_afd.mlp.group import MemberReport
from sglang_afd.mlp.http_process import HttpProcess
from sglang_afd.mlp.leader import find_leader
from sglang_afd.mlp.open_exchange import ServesRows, open_exchange
from sglang_afd.mlp.place import NO_RANK
from sglang_afd.mlp.private_address import private_ipc_address
from sglang_afd.mlp.rank_order import make_rank_order
from sglang_afd.model_config import num_experts_of
from sglang_afd.protocol import auth
from sglang_afd.protocol.handshake import Gate, MlpIdentity
from sglang_afd.protocol.messages import ModelSpec
from sglang_afd.registrar.address import advertised_url, server_id, with_ports
from sglang_afd.topology import ExpertShard
from sglang_afd.trace import file as trace_file
from sglang_afd.trace import mlp as mlp_timeline
from sglang_afd.transport.zmq_follower import ZmqFollower
from sglang_afd.transport.zmq_handshake import GreetOptions
from sglang_afd.upstream import gpu_memory
from sglang_afd.upstream.environment import import_model
from sglang_afd.upstream.server_args import ServerArgs, model_fingerprint
from sglang_afd.upstream.versions import check_version

logger = logging.getLogger(__name__)

CHILD_CHECK_S = 1.0
DRAIN_CHECK_S = 0.1


def serve(config: AfdConfig, server_args: ServerArgs, *, ep_size: int) -> int:
    """Serve one rank, or wait for one, until SIGTERM or SIGINT; returns the exit code."""
    secret = auth.load_secret(config.secret_file)
    listen = config.listen or private_ipc_address()
    auth.require_secret_beyond_loopback(listen, secret, "--afd-listen")
    for url in config.leader_urls:
        auth.require_secret_beyond_loopback(url, secret, "--afd-leader")
    for url in config.router_urls:
        auth.require_secret_beyond_loopback(url, secret, "--afd-router")
    with_rounds = has_rounds()
    transport = choose_transport(
        config.transport, is_cuda=server_args.device == "cuda", address=listen
    )
    if config.trace_file:
        trace_file.check(config.trace_file)
    listener = _bind(server_args.host, server_args.port)
    stop = _StopFlag()
    print_of_model = model_fingerprint(server_args)  # before the load, since it finds broken shards
    report = MemberReport(
        rank=NO_RANK if config.is_spare else config.ep_rank,
        ep_size=ep_size,
        boot_id=secrets.token_hex(8),
        fingerprint=print_of_model,
        exchange_address="",
        sent_at_s=0.0,
    )
    options = http.HttpOptions(
        info=_early_info(config, server_args, report),
        report=report,
        leader_urls=config.leader_urls,
        secret=secret,
        name=_name(config, server_args),
        router_urls=config.router_urls,
        drain_timeout_s=config.drain_timeout_s,
    )
    board = Board(_num_local(server_args, ep_size))
    http_process = HttpProcess(listener, board, options)
    if options.asks_first:
        import_model(server_args)  # so that a spare has less to do when it is needed
    stop.watch(http_process)
    rank = http_process.wait_for_rank(stop) if options.asks_first else report.rank
    if rank is None:
        http_process.stop()
        return 0
    timeline = mlp_timeline.begin(config.trace_file, f"mlp-{rank}-{report.boot_id[:6]}", rank)
    started_s = time.monotonic()
    with stop.at_once():
        experts = Experts(
            server_args, rank=rank, ep_size=ep_size, deep_gemm_sms=config.deep_gemm_sms
        )
        _check_size(experts, board)
        identity = _identity(config, report, experts, transport)
        gate = Gate(identity, secret, max_peers=config.max_peers)
        exchange = open_exchange(config, gate, experts, listen, has_rounds=with_rounds)
        hub = exchange.hub
        if rank and with_rounds:
            hub.follow(_follower(config, identity, secret, board))
    http_process.serve(options.info | _info(identity, experts, exchange), hub.address)
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
    order = make_rank_order(
        hub.order, sorted(experts.layers), rank=rank, ep_size=ep_size, has_rounds=with_rounds
    )
    if config.router_urls:
        stop.drain_first()
    return _run(
        functools.partial(exchange.run, board, order, stop, timeline), exchange, http_process
    )


class _StopFlag:
    """Asked by the loop at every turn: a signal came, or the HTTP process died.

    SIGTERM lets the HTTP process drain this server first, once `drain_first` was called.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._drains_first = False
        self._is_asked_to_drain = False
        self._is_draining = False
        self._ends_at_once = True  # nothing asks yet
        self._http_process: HttpProcess | None = None
        self._next_check_s = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def watch(self, http_process: HttpProcess) -> None:
        self._http_process = http_process
        self._ends_at_once = False

    def drain_first(self) -> None:
        self._drains_first = True

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A signal ends what runs in here, which does not ask."""
        if self._is_set:
            raise SystemExit(128 + signal.SIGTERM)
        self._ends_at_once = True
        yield
        self._ends_at_once = False

    def __call__(self) -> bool:
        now_s = time.monotonic()
        if self._http_process is not None and now_s >= self._next_check_s:
            self._http_process.check()
            if self._is_asked_to_drain:
                self._drain(self._http_process)
            self._next_check_s = now_s + (DRAIN_CHECK_S if self._is_draining else CHILD_CHECK_S)
        return self._is_set

    def _drain(self, http_process: HttpProcess) -> None:
        if not self._is_draining:
            self._is_draining = True
            http_process.drain()
        elif http_process.is_drained():
            self._is_set = True

    def _on_signal(self, number: int, frame: object) -> None:
        if self._ends_at_once:
            raise SystemExit(128 + number)
        if number == signal.SIGTERM and self._drains_first:
            self._is_asked_to_drain = True
            self._next_check_s = 0.0
        else:
            self._is_set = True


def _run(run: Callable[[], None], exchange: ServesRows, http_process: HttpProcess) -> int:
    with ExitStack() as stack:
        stack.callback(http_process.stop)
        try:
            run()
        except DeviceFailed as error:
            logger.critical("%s", error)
            http_process.stop()
            os._exit(1)  # CUDA's own end could wait for what never ends
        finally:
            exchange.hub.close()
    return 0


def _num_local(server_args: ServerArgs, ep_size: int) -> int:
    num_experts = num_experts_of(server_args.model_path, server_args.json_model_override_args)
    return ExpertShard(rank=0, ep_size=ep_size, num_experts=num_experts).num_local


def _check_size(experts: Experts, board: Board) -> None:
    if experts.shard.num_local != board.num_local_experts:
        raise ConfigError(
            f"{experts.architecture} has {experts.shard.num_local} experts a rank, its config.json "
            f"tells of {board.num_local_experts}; such a model is not supported yet"
        )


def _name(config: AfdConfig, server_args: ServerArgs) -> Name:
    url = advertised_url(config, host=server_args.host, port=server_args.port)
    return Name(
        server_id=server_id(config, url),
        url=url,
        peer_urls=with_ports(config.leader_urls),
        num_experts=num_experts_of(server_args.model_path, server_args.json_model_override_args),
    )


def _follower(config: AfdConfig, identity: MlpIdentity, secret: bytes, board: Board) -> ZmqFollower:
    options = GreetOptions(
        server_id=f"mlp-{identity.rank}",
        spec=identity.spec,
        secret=secret,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
    )

    def find() -> str:
        return find_leader(config.leader_urls or board.told.read().urls, identity.boot_id)

    return ZmqFollower(find, options, rank=identity.rank)


def _identity(
    config: AfdConfig, report: MemberReport, experts: Experts, transport: Transport
) -> MlpIdentity:
    dtype = str(experts.dtype).removeprefix("torch.")
    return MlpIdentity(
        spec=ModelSpec(
            package_version=__version__,
            sglang_version=check_version(),
            fingerprint=report.fingerprint,
            architecture=experts.architecture,
            dtype=dtype,
            hidden_size=experts.hidden_size,
            top_k=experts.top_k,
            num_experts=experts.shard.num_experts,
            moe_layer_ids=tuple(sorted(experts.layers)),
            max_rows=config.max_rows,
            transport=transport.value,
            dispatch_dtype=FP8 if config.dispatch_dtype == FP8 else dtype,
        ),
        rank=experts.shard.rank,
        ep_size=experts.shard.ep_size,
        first_expert=experts.shard.first,
        stop_expert=experts.shard.stop,
        boot_id=report.boot_id,
    )


def _early_info(config: AfdConfig, server_args: ServerArgs, report: MemberReport) -> dict[str, Any]:
    return {
        "role": "mlp",
        "model_path": server_args.model_path,
        "fingerprint": report.fingerprint,
        "ep_size": report.ep_size,
        "device": server_args.device,
        "max_rows": config.max_rows,
        "boot_id": report.boot_id,
        "versions": {
            "sglang_afd": __version__,
            "sglang": check_version(),
            "torch": torch.__version__,
        },
    }


def _info(identity: MlpIdentity, experts: Experts, exchange: ServesRows) -> dict[str, Any]:
    spec = identity.spec
    return {
        "architecture": spec.architecture,
        "moe_layer_ids": list(spec.moe_layer_ids),
        "num_experts": spec.num_experts,
        "first_expert": identity.first_expert,
        "stop_expert": identity.stop_expert,
        "dtype": spec.dtype,
        "exchange_address": exchange.hub.address,
        "transport": spec.transport,
        "dispatch_dtype": spec.dispatch_dtype,
        "weights": {
            "num_tensors_read": experts.read_count.num_tensors,
            "num_expert_tensors_read": experts.read_count.num_expert_tensors,
            "num_tensors_skipped": experts.read_count.num_skipped,
            "num_bytes_read": experts.read_count.num_bytes,
        },
        "memory": gpu_memory.memory_of(
            tensor for layer in experts.layers.values() for tensor in layer.parameters()
        ),
        **exchange.info,
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
