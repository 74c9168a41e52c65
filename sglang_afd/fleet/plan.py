"""Every server of a launch: its name, its command line, where to ask whether it is ready (pure)."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_afd.fleet.config import LaunchConfig
from sglang_afd.fleet.on_gpus import OnGpus
from sglang_afd.fleet.spec import ServerSpec
from sglang_afd.protocol.paths import HEALTH_PATH, STATUS_PATH

SERVER_HOST = "127.0.0.1"
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
STOP_STAGES = {"router": 0, "attn": 1, "mlp": 2}
# SGLang looks for SIGTERM every 5 s, to let requests finish; the router has seen to that by then.
STOP_SIGNALS = {"attn": signal.SIGINT, "mlp": signal.SIGTERM}


def router_url(config: LaunchConfig) -> str:
    """Where this host reaches the router."""
    return _url_here(config.host, config.port)


def router_own_url(config: LaunchConfig) -> str:
    """Where it reaches the router's own endpoints, which are apart with `--data-plane smg`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data-plane", default="relay")
    parser.add_argument("--control-port", type=int, default=0)
    args, _ = parser.parse_known_args(config.router_args)
    if args.data_plane == "relay":
        return router_url(config)
    return _url_here(config.host, args.control_port or config.port + 1)


def _url_here(host: str, port: int) -> str:
    host = ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the servers of one launch live."""

    config: LaunchConfig
    model_path: Path  # the checkpoint that all of them load
    ports: Sequence[int]  # a free one per MLP server, attention server and spare
    on_gpus: OnGpus = field(default_factory=OnGpus)  # empty is a machine without GPUs
    python: str = sys.executable

    def servers(self) -> list[ServerSpec]:
        """All servers; the order does not matter, each waits for those that it needs."""
        mlp = [self._mlp(rank) for rank in range(self.config.mlp)]
        spares = [self._spare(index) for index in range(self.config.spares)]
        attn = [self._attn(index) for index in range(self.config.attn)]
        return [*mlp, *spares, *attn, self._router()]

    def _mlp(self, rank: int) -> ServerSpec:
        flags = ["--ep-size", str(self.config.mlp), "--afd-ep-rank", str(rank)]
        if rank > 0 or self.config.spares > 0:
            flags += ["--afd-leader", self._leaders()]
        return self._server("mlp", rank, rank, [*flags, *self.config.mlp_args])

    def _spare(self, index: int) -> ServerSpec:
        flags = ["--ep-size", str(self.config.mlp), "--afd-spare", "--afd-leader", self._leaders()]
        place = self.config.mlp + self.config.attn + index
        return self._server("mlp", self.config.mlp + index, place, [*flags, *self.config.mlp_args])

    def _attn(self, index: int) -> ServerSpec:
        flags = ["--afd-mlp", self._leaders()]
        if not self.on_gpus.flags:
            # A scheduler without requests would otherwise take a whole core.
            flags.append("--sleep-on-idle")
        place = self.config.mlp + index
        return self._server("attn", index, place, [*flags, *self.config.attn_args])

    def _leaders(self) -> str:
        """Where rank 0 may be: at its own address, or at a spare's."""
        first = self.config.mlp + self.config.attn
        places = [0, *range(first, first + self.config.spares)]
        return ",".join(self._url(place) for place in places)

    def _router(self) -> ServerSpec:
        num_mlp, num_attn = self.config.mlp, self.config.attn
        spares = range(num_mlp + num_attn, num_mlp + num_attn + self.config.spares)
        argv = [self.python, "-m", "sgl_router_afd.launch_router"]
        argv += ["--attn", *(self._url(place) for place in range(num_mlp, num_mlp + num_attn))]
        argv += ["--mlp", *(self._url(place) for place in (*range(num_mlp), *spares))]
        argv += ["--host", self.config.host, "--port", str(self.config.port)]
        return ServerSpec(
            name="router",
            argv=(*argv, *self.config.router_args),
            status_url=router_own_url(self.config) + HEALTH_PATH,
            stop_stage=STOP_STAGES["router"],
        )

    def _server(self, role: str, index: int, place: int, flags: Sequence[str]) -> ServerSpec:
        argv = [self.python, "-m", "sglang_afd.launch_server", "--role", role]
        argv += ["--model-path", str(self.model_path)]
        argv += ["--host", SERVER_HOST, "--port", str(self.ports[place])]
        name = f"{role}-{index}"
        argv += self.on_gpus.flags.get(name, ())
        return ServerSpec(
            name=name,
            argv=(*argv, *self.config.server_args, *flags),
            status_url=self._url(place) + STATUS_PATH,
            stop_signal=STOP_SIGNALS[role],
            stop_stage=STOP_STAGES[role],
            environment=self.on_gpus.environment.get(name, {}),
            has_spares=role == "mlp" and self.config.spares > 0,
        )

    def _url(self, place: int) -> str:
        return f"http://{SERVER_HOST}:{self.ports[place]}"
