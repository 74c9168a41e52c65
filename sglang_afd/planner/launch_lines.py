"""The command lines that start a deployment, and what about it this version cannot do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode
from sglang_afd.planner.scenario import Scenario

ROUTER_PORT = 30000
ATTN_PORT = 30100
MLP_PORT = 31000
EXCHANGE_PORT = 7000
SECRET_FILE = "afd.secret"
# The largest of launch_server's defaults: peers attached, rows of one exchange, ranks of a slot.
_MAX_PEERS = 64
_MAX_ROWS = 2048
_MAX_RANKS = 64
# Architectures that the tests of this project cover begin so.
_TESTED = ("qwen3-", "qwen2-", "qwen1.5-moe")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One command on one host."""

    host: str  # a placeholder, to be replaced by a name or an address
    argv: tuple[str, ...]

    @property
    def text(self) -> str:
        """For a shell."""
        return shlex.join(self.argv)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All commands of a deployment."""

    router: Line
    mlp: tuple[Line, ...]
    attn: tuple[Line, ...]
    notes: tuple[str, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """In the order to start them."""
        return (self.router, *self.mlp, *self.attn)


def checkpoint(model: str | None, name: str) -> str:
    """What `--model-path` gets: the folder of `--model`, or a name that stands for it."""
    if model is None:
        return name
    return str(Path(model).parent) if model.endswith(".json") else model


def launch(scenario: Scenario, deployment: Deployment, model_path: str) -> Launch:
    """MLP ranks get the first GPUs, attention servers the next, host by host.

    Args:
        scenario: What the deployment is for.
        deployment: With the experts apart; one copy of them.
        model_path: What `--model-path` gets.
    """
    assert deployment.mode is Mode.AFD, "only whole experts are apart in sglang-afd"
    places = _Places(
        num_gpus=deployment.total_gpus,
        gpus_per_host=scenario.gpu.gpus_per_node,
    )
    common = _Common(
        model_path=model_path,
        places=places,
        extra=_server_flags(scenario, places),
    )
    mlp_gpus = deployment.mlp_gpus
    router_argv = ["python", "-m", "sgl_router_afd.launch_router", "--port", str(ROUTER_PORT)]
    router_argv += ["--ratio", f"{deployment.attn_gpus}:{mlp_gpus}"]
    if not places.is_one_host:
        router_argv += ["--host", "0.0.0.0", "--afd-secret-file", SECRET_FILE]
    return Launch(
        router=Line(host=places.host(0), argv=tuple(router_argv)),
        mlp=tuple(_mlp_line(common, deployment, rank) for rank in range(mlp_gpus)),
        attn=tuple(
            _attn_line(common, scenario, deployment, index) for index in range(deployment.attn_gpus)
        ),
        notes=(
            *_checkpoint_notes(model_path),
            *_notes(scenario, deployment, places),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Places:
    num_gpus: int
    gpus_per_host: int

    @property
    def is_one_host(self) -> bool:
        return self.num_gpus <= self.gpus_per_host

    @property
    def num_hosts(self) -> int:
        return -(-self.num_gpus // self.gpus_per_host)

    def host(self, gpu: int) -> str:
        return "127.0.0.1" if self.is_one_host else f"host-{gpu // self.gpus_per_host}"

    def local_gpu(self, gpu: int) -> int:
        return gpu % self.gpus_per_host


@dataclass(frozen=True, kw_only=True)
class _Common:
    model_path: str
    places: _Places
    extra: Sequence[str]

    def server(self, role: str, gpu: int, port: int) -> list[str]:
        """What every server has."""
        host = self.places.host(gpu)
        argv = ["python", "-m", "sglang_afd.launch_server", "--role", role]
        argv += ["--model-path", self.model_path]
        argv += ["--base-gpu-id", str(self.places.local_gpu(gpu)), "--port", str(port)]
        argv += ["--afd-router", f"http://{self.places.host(0)}:{ROUTER_PORT}"]
        if not self.places.is_one_host:
            argv += ["--host", "0.0.0.0", "--afd-advertise-url", f"http://{host}:{port}"]
            argv += ["--afd-secret-file", SECRET_FILE]
        return [*argv, *self.extra]


def _mlp_line(common: _Common, deployment: Deployment, rank: int) -> Line:
    argv = common.server("mlp", rank, MLP_PORT + rank)
    argv += ["--ep-size", str(deployment.mlp_gpus), "--afd-ep-rank", str(rank)]
    if not common.places.is_one_host:
        argv += ["--afd-listen", f"tcp://0.0.0.0:{EXCHANGE_PORT + rank}"]
    if deployment.attn_gpus > _MAX_PEERS:
        argv += ["--afd-max-peers", str(deployment.attn_gpus)]
    return Line(host=common.places.host(rank), argv=tuple(argv))


def _attn_line(common: _Common, scenario: Scenario, deployment: Deployment, index: int) -> Line:
    gpu = deployment.mlp_gpus + index
    argv = common.server("attn", gpu, ATTN_PORT + index)
    batch = deployment.batch_per_attn_gpu
    argv += ["--afd-num-micro-batches", str(deployment.micro_batches)]
    argv += ["--max-running-requests", str(batch)]
    if common.places.is_one_host:
        argv += ["--afd-max-mlp-ranks", str(min(deployment.mlp_gpus, _MAX_RANKS))]
        argv += ["--cuda-graph-max-bs-decode", str(batch)]
    if scenario.shape.kv_element_bytes <= 1:
        argv += ["--kv-cache-dtype", "fp8_e4m3"]
    return Line(host=common.places.host(gpu), argv=tuple(argv))


def _server_flags(scenario: Scenario, places: _Places) -> list[str]:
    flags = []
    if not _is_tested(scenario):
        flags.append("--afd-allow-untested-model")
    if places.is_one_host and scenario.shape.weight_bytes <= 1:
        flags += ["--afd-dispatch-dtype", "fp8"]
    return flags


def _is_tested(scenario: Scenario) -> bool:
    name = scenario.shape.name.rsplit("/", 1)[-1].lower()
    return name.startswith(_TESTED)


def _checkpoint_notes(model_path: str) -> list[str]:
    if Path(model_path).is_dir():
        return []
    return [f"Give --model-path the directory of the checkpoint instead of {model_path}."]


def _notes(scenario: Scenario, deployment: Deployment, places: _Places) -> list[str]:
    notes = []
    if not places.is_one_host:
        notes.append(
            f"It spans {places.num_hosts} hosts of {places.gpus_per_host} GPUs. The prediction has "
            "rows travel between GPUs; between hosts this version of sglang-afd sends them through "
            "host memory, and attention runs without CUDA graphs: slower than predicted."
        )
        notes.append(
            f"Replace host-0 to host-{places.num_hosts - 1} by names or addresses, and give every "
            f"host the same {SECRET_FILE} (mode 0600, 16 bytes or more)."
        )
    if deployment.expert_kernels is ExpertKernels.FUSED:
        notes.append("sglang-afd runs grouped kernels; it has no fused ones.")
    if scenario.workload.verify_tokens > 1:
        notes.append("This version of sglang-afd refuses speculative decoding.")
    if not _is_tested(scenario):
        notes.append(
            f"The tests of sglang-afd do not cover {scenario.shape.name}; compare its answers with "
            "those of stock SGLang first."
        )
    return notes
