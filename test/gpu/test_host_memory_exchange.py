"""Both roles on one GPU, rows through host memory: what stock SGLang answers on that GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import checkpoints
import pytest
from compare import PROMPTS, Answer, ask_at_once, ask_one_by_one, differences
from servers import SUPPORT, Server, free_port, running

FLAGS = (
    *("--dtype", "float32", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--mem-fraction-static", "0.2", "--max-total-tokens", "8192", "--max-running-requests", "32"),
    *("--chunked-prefill-size", "128", "--sleep-on-idle"),
)
NO_GRAPHS = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")
# The import of SGLang alone takes 20 s a process, and the kernels of a fresh machine half a minute.
START_TIMEOUT_S = 240.0
pytestmark = pytest.mark.timeout(2 * START_TIMEOUT_S)

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start one server as users do, in processes of its own."""
    directory = tmp_path_factory.mktemp("servers")
    processes: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "TRITON_F32_DEFAULT": "ieee",  # by default Triton multiplies float32 in TF32
    }

    def start(module: str, *argv: str) -> Server:
        port = free_port()
        log = directory / f"{module}-{port}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *argv, "--port", str(port)],
                stdout=output,
                stderr=output,
                env=environment,
                cwd=SUPPORT.parents[1],
                start_new_session=True,
            )
        processes.append(process)
        return Server(process.pid, port, log)

    yield start
    for process in processes:
        process.wait(10)


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint of each family."""
    make = {
        "qwen3": checkpoints.make_qwen3_moe,
        "qwen2": checkpoints.make_qwen2_moe_shared_expert,
    }[request.param]
    return make(tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def fleet(start: Start, model: Path) -> Iterator[tuple[Server, Server]]:
    """Stock SGLang, and an attention server with two MLP ranks, all at once on one GPU."""
    stock = start("sglang.launch_server", "--model-path", str(model), *FLAGS, *NO_GRAPHS)
    common = ("--model-path", str(model), "--dtype", "float32", "--afd-max-rows", "48")
    ranks = [start("sglang_afd.launch_server", "--role", "mlp", *common, *_rank(0))]
    leader = f"http://127.0.0.1:{ranks[0].port}"
    ranks.append(
        start(
            "sglang_afd.launch_server", "--role", "mlp", *common, *_rank(1), "--afd-leader", leader
        )
    )
    attn = start("sglang_afd.launch_server", "--role", "attn", *common, *FLAGS, "--afd-mlp", leader)
    with running([stock, *ranks, attn]):
        stock.wait("/health", timeout_s=START_TIMEOUT_S)
        attn.wait("/afd/v1/status", lambda body: body["state"] == "ready", START_TIMEOUT_S)
        yield stock, attn


def _rank(rank: int) -> Sequence[str]:
    return ("--ep-size", "2", "--afd-ep-rank", str(rank))


def _agrees(expected: list[Answer], got: list[Answer]) -> None:
    assert differences(expected, got) == []


def test_the_split_model_is_token_identical_on_a_gpu(fleet: tuple[Server, Server]) -> None:
    stock, attn = fleet

    _agrees(ask_one_by_one(stock.url, PROMPTS[:6]), ask_one_by_one(attn.url, PROMPTS[:6]))
    _agrees(ask_at_once([stock.url]), ask_at_once([attn.url]))
