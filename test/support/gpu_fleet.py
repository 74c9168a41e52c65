"""One model's servers on one GPU, in the covering set of the GPU tests.

The same code runs on a CPU (TEST_DEVICE=cpu), without graphs and through host memory, so that what
is wrong with it is found where no GPU is held.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import checkpoints
from servers import CPU_FLAGS, Server, Zygote, print_tails, running

from sglang_afd.ports import free_ports

IS_CPU = os.environ.get("TEST_DEVICE") == "cpu"
START_TIMEOUT_S = float(os.environ.get("TEST_START_TIMEOUT_S", "90"))
MAX_ROWS = 48  # so that long prompts go in several pieces
GRAPH_BATCHES = ("4", "16", "32")  # few, so that they are captured soon, and most batches padded
UNIT_ROWS = "8,32,96"  # the same for expert runs, which hold rows of several attention servers


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A dtype, and the kernels that go with it."""

    dtype: str
    hidden_size: int  # of four heads
    flags: tuple[str, ...]


# Deterministic inference makes a row's result independent of the rows beside it, so that tokens can
# be compared; SGLang's other RMSNorm for CUDA has no float32, too. Without it, in bfloat16, what
# users run is compared: two runs of stock SGLang with other batches differ there as well.
PRECISIONS = {
    "exact": Precision(
        dtype="float32",
        hidden_size=256,
        flags=("--attention-backend", "triton", "--enable-deterministic-inference"),
    ),
    "fast": Precision(dtype="bfloat16", hidden_size=512, flags=("--attention-backend", "fa3")),
    "flashinfer": Precision(
        dtype="bfloat16", hidden_size=512, flags=("--attention-backend", "flashinfer")
    ),
}
FAMILIES: Mapping[str, Callable[..., Path]] = {
    "qwen3": checkpoints.make_qwen3_moe,
    "qwen2": checkpoints.make_qwen2_moe_shared_expert,
}


@dataclass(frozen=True, kw_only=True)
class Combination:
    """How one model is served."""

    family: str
    precision: str
    has_graphs: bool
    num_micro_batches: int
    num_attn: int
    num_mlp: int
    transport: str = "cuda_ipc"
    wait_policy: str = "poll"

    def __str__(self) -> str:
        parts = [self.family, self.precision, "graphs" if self.has_graphs else "eager"]
        parts += [f"mb{self.num_micro_batches}", f"{self.num_attn}attn", f"{self.num_mlp}mlp"]
        parts += [self.wait_policy] if self.wait_policy != "poll" else []
        parts += [self.transport] if self.transport != "cuda_ipc" else []
        return "-".join(parts)


def _row(
    family: str, precision: str, graphs: bool, micro_batches: int, attn: int, mlp: int
) -> Combination:
    return Combination(
        family=family,
        precision=precision,
        has_graphs=graphs,
        num_micro_batches=micro_batches,
        num_attn=attn,
        num_mlp=mlp,
    )


SMOKE = _row("qwen3", "exact", True, 1, 1, 1)
# Every two values of two columns stand together in one row; see test_gpu_fleet.py.
COVERING = (
    SMOKE,
    _row("qwen3", "exact", True, 2, 3, 1),
    _row("qwen3", "exact", False, 2, 2, 2),
    _row("qwen2", "exact", False, 1, 1, 1),
    _row("qwen3", "fast", True, 1, 2, 1),
    _row("qwen3", "fast", True, 2, 1, 2),
    _row("qwen2", "fast", True, 2, 2, 1),
    _row("qwen2", "fast", False, 1, 3, 2),
)
OTHERS = (
    replace(SMOKE, wait_policy="memop", num_micro_batches=2),
    replace(SMOKE, has_graphs=False, num_mlp=2, num_micro_batches=2, transport="zmq"),
)
COMBINATIONS = COVERING + OTHERS
SLOW = _row("qwen3", "flashinfer", True, 2, 1, 1)  # minutes, to compile FlashInfer's kernels


@dataclass(frozen=True)
class Fleet:
    """Servers that were started; `ready` waits for them."""

    name: str
    attn: list[Server]
    mlp: list[Server]

    @property
    def servers(self) -> list[Server]:
        """All of them."""
        return [*self.mlp, *self.attn]

    @property
    def urls(self) -> list[str]:
        """Of the attention servers."""
        return [server.url for server in self.attn]

    def ready(self) -> Fleet:
        """Wait until every attention server is attached and warm."""
        started_s = time.monotonic()
        for server in self.mlp:
            server.wait("/health", timeout_s=START_TIMEOUT_S)
        for server in self.attn:
            wait_ready(server)
        say(f"{self.name}: ready, after {time.monotonic() - started_s:.1f} s of waiting")
        return self


_began_s = time.monotonic()


def say(text: str) -> None:
    """A line that shows where the time goes, and where something hangs."""
    print(f"[{time.monotonic() - _began_s:6.1f} s] {text}", file=sys.__stderr__, flush=True)


def model_flags(model: Path, precision: str) -> tuple[str, ...]:
    """What all servers of one model share."""
    if IS_CPU:
        return ("--model-path", str(model), "--dtype", "float32")
    chosen = PRECISIONS[precision]
    return ("--model-path", str(model), "--dtype", chosen.dtype, *chosen.flags)


def serving_flags(*, has_graphs: bool) -> tuple[str, ...]:
    """Of stock SGLang and of attention servers."""
    common = ("--chunked-prefill-size", "128", "--sleep-on-idle")
    if IS_CPU:
        return (*CPU_FLAGS, *common)
    graphs = (
        ("--cuda-graph-bs-decode", *GRAPH_BATCHES)
        if has_graphs
        else ("--cuda-graph-backend-decode", "disabled")
    )
    return (
        # The fraction bounds nothing here; it leaves room for servers that start meanwhile.
        *("--mem-fraction-static", "0.5", "--max-total-tokens", "8192"),
        *("--max-running-requests", "32", "--sampling-backend", "pytorch"),
        *("--decode-log-interval", "4"),
        *("--cuda-graph-backend-prefill", "disabled"),
        *graphs,
        *common,
    )


def exchange_flags(transport: str, *more: str) -> tuple[str, ...]:
    """Of both roles."""
    common = ("--afd-max-rows", str(MAX_ROWS))
    return common if IS_CPU else (*common, "--afd-transport", transport, *more)


def start_stock(zygote: Zygote, model: Path, precision: str, *more: str) -> Server:
    """Stock SGLang with CUDA graphs for decode; not waited for."""
    argv = (*model_flags(model, precision), *serving_flags(has_graphs=True), *more)
    return zygote.start("stock", argv)


def start_mlp(
    zygote: Zygote,
    model: Path,
    precision: str,
    ports: Sequence[int],
    flags: Sequence[str],
    *,
    has_graphs: bool = True,
    plant: str | None = None,
    env: dict[str, str] | None = None,
    only_rank: int | None = None,
) -> list[Server]:
    """One MLP server for each port (or `only_rank`'s), rank 0 first; not waited for.

    Every rank has the plant.
    """
    servers = []
    graphs: Sequence[str] = ()
    if not IS_CPU and "zmq" not in flags:
        listed = ("--afd-mlp-cuda-graph-bs", UNIT_ROWS)
        graphs = listed if has_graphs else ("--afd-disable-mlp-cuda-graph",)
    for rank, port in enumerate(ports):
        if only_rank not in (None, rank):
            continue
        leader = ("--afd-leader", f"http://127.0.0.1:{ports[0]}") if rank else ()
        argv = (
            *("--role", "mlp", *model_flags(model, precision), *flags, *graphs),
            *("--ep-size", str(len(ports)), "--afd-ep-rank", str(rank), *leader),
        )
        server = zygote.start("afd", (*argv, "--port", str(port)), plant=plant, env=env)
        servers.append(Server(server.pid, port, server.log))
    return servers


def start_attn(
    zygote: Zygote,
    model: Path,
    precision: str,
    mlp_port: int,
    flags: Sequence[str],
    *,
    has_graphs: bool = True,
    num_micro_batches: int = 1,
    plant: str | None = None,
    env: dict[str, str] | None = None,
) -> Server:
    """An attention server; not waited for."""
    argv = (
        *("--role", "attn", *model_flags(model, precision)),
        *serving_flags(has_graphs=has_graphs),
        *("--afd-mlp", f"http://127.0.0.1:{mlp_port}", *flags),
        *("--afd-num-micro-batches", str(num_micro_batches)),
        *("--afd-attach-timeout", f"{START_TIMEOUT_S:g}"),
    )
    return zygote.start("afd", argv, plant=plant, env=env)


def start_fleet(zygote: Zygote, model: Path, combination: Combination) -> Fleet:
    """All servers of a combination at once; not waited for."""
    flags = exchange_flags(combination.transport, "--afd-wait-policy", combination.wait_policy)
    ports = free_ports(combination.num_mlp)
    has_graphs = combination.has_graphs
    mlp = start_mlp(zygote, model, combination.precision, ports, flags, has_graphs=has_graphs)
    attn = [
        start_attn(
            *(zygote, model, combination.precision, ports[0], flags),
            has_graphs=has_graphs,
            num_micro_batches=combination.num_micro_batches,
        )
        for _ in range(combination.num_attn)
    ]
    return Fleet(str(combination), attn, mlp)


def metric(rank: Server, name: str) -> float:
    """A counter of an MLP server, without its prefix."""
    text = rank.get("/metrics")[1]
    found = re.search(rf"^sglang_afd_mlp_{name}\{{.*\}} ([\d.e+]+)$", str(text), re.M)
    assert found, f"no {name} in {text}"
    return float(found[1])


def wait_ready(server: Server) -> None:
    """Until an attention server is attached and warm."""
    server.wait("/afd/v1/status", lambda body: body["state"] == "ready", START_TIMEOUT_S)


@contextmanager
def telling(servers: Sequence[Server]) -> Iterator[None]:
    """End `servers` after the block; where it fails, show their stacks and what they printed.

    A time-out of pytest is such a failure: it is raised in the test.
    """
    with running(servers):
        try:
            yield
        except BaseException:
            print_tails(servers)
            raise
