"""One rank in this process, or every rank of a group as child processes of this one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

from sglang_afd.config import AfdConfig
from sglang_afd.errors import AfdError, ConfigError
from sglang_afd.mlp import server
from sglang_afd.model_config import num_experts_of
from sglang_afd.process import die_with_parent
from sglang_afd.topology import ExpertShard
from sglang_afd.trace.file import place_of_rank
from sglang_afd.upstream.server_args import ServerArgs

POLL_S = 0.2
GRACE_S = 10.0  # for children to stop by themselves, once they have drained


def serve(config: AfdConfig, server_args: ServerArgs, *, ep_size: int, argv: Sequence[str]) -> int:
    """Serve `--afd-ep-rank`, or a spare, or all ranks on the ports from `--port` on."""
    experts = num_experts_of(server_args.model_path, server_args.json_model_override_args)
    last = config.ep_rank if config.ep_rank >= 0 else ep_size - 1
    ExpertShard(rank=last, ep_size=ep_size, num_experts=experts)  # refuses an empty rank
    if config.is_spare:
        return server.serve(config, server_args, ep_size=ep_size)
    if config.ep_rank >= 0 or ep_size == 1:
        return server.serve(
            replace(config, ep_rank=max(config.ep_rank, 0)), server_args, ep_size=ep_size
        )
    if config.listen:
        raise ConfigError(
            "--afd-listen with several ranks in one command would give them one address; "
            "leave it out, or start each rank with its own --afd-ep-rank and --afd-listen"
        )
    if config.advertise_url:
        raise ConfigError(
            "--afd-advertise-url with several ranks in one command would give them one address; "
            "leave it out, or start each rank with its own --afd-ep-rank and --afd-advertise-url"
        )
    return _Ranks(config, server_args, ep_size, argv).run()


def leader_url(host: str, port: int) -> str:
    """Where the other ranks on this host reach rank 0, which listens on `host`."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


class _Ranks:
    """The children, one for each rank; the first that ends takes the others along."""

    def __init__(
        self, config: AfdConfig, server_args: ServerArgs, ep_size: int, argv: Sequence[str]
    ) -> None:
        name, trace_file = config.server_id, config.trace_file
        drain_s = config.drain_timeout_s if config.router_url else 0.0
        self._grace_s = drain_s + GRACE_S
        leader = leader_url(server_args.host, server_args.port)
        self._commands = [
            [
                *(sys.executable, "-m", "sglang_afd.launch_server", *argv),
                *("--port", str(server_args.port + rank), "--afd-ep-rank", str(rank)),
                *(("--afd-leader", leader) if rank else ()),
                *(("--afd-server-id", f"{name}-{rank}") if name else ()),
                *(("--afd-trace", place_of_rank(trace_file, rank)) if trace_file else ()),
            ]
            for rank in range(ep_size)
        ]
        self._children: list[subprocess.Popen[bytes]] = []
        self._signal = 0

    def run(self) -> int:
        """Start all, wait for the first to end or for a signal, stop the rest."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._children = [
            subprocess.Popen(command, preexec_fn=die_with_parent)  # no threads yet
            for command in self._commands
        ]
        ended: int | None = None
        while ended is None and not self._signal:
            time.sleep(POLL_S)
            ended = next((r for r, c in enumerate(self._children) if c.poll() is not None), None)
        self._stop()
        if ended is not None:
            code = self._children[ended].returncode
            raise AfdError(f"MLP rank {ended} ended with exit code {code}; the others were stopped")
        return 0

    def _stop(self) -> None:
        for child in self._children:
            child.terminate()
        deadline_s = time.monotonic() + self._grace_s
        for child in self._children:
            try:
                child.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
