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

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start one server as users do, in processes of its own."""
    directory = tmp_path_factory.mktemp("servers")

    def start(module: str, *argv: str) -> Server:
        port = free_port()
        log = directory / f"{module}-{port}.log"
        environment = os.environ | {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *argv, "--port", str(port)],
                stdout=output,
                stderr=output,
                env=environment,
                cwd=SUPPORT.parents[1],
                start_new_session=True,
            )
        return Server(process.pid, port, log)

    return start


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
        stock.wait("/health")
        attn.wait("/afd/v1/status", lambda body: body["state"] == "ready")
        yield stock, attn


def _rank(rank: int) -> Sequence[str]:
    return ("--ep-size", "2", "--afd-ep-rank", str(rank))


def _agrees(expected: list[Answer], got: list[Answer]) -> None:
    assert differences(expected, got) == []


def test_the_split_model_is_token_identical_on_a_gpu(fleet: tuple[Server, Server]) -> None:
    stock, attn = fleet

    _agrees(ask_one_by_one(stock.url, PROMPTS[:6]), ask_one_by_one(attn.url, PROMPTS[:6]))
    _agrees(ask_at_once([stock.url]), ask_at_once([attn.url]))
