"""Micro-batches with attention backends that keep a plan of each batch, against stock SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import checkpoints
import pytest
from compare import PROMPTS, ask_at_once, ask_one_by_one, differences
from gpu_servers import FLAGS, NO_GRAPHS, START_TIMEOUT_S, Start
from servers import Server, running

# FlashInfer adds up in another order where a prompt is cut inside; bfloat16 then moves logprobs by
# as much as another batch does in stock SGLang.
BOUNDS = {"triton": 0.0, "fa3": 0.0, "flashinfer": 5e-2}
NUMBERS = ("2", "3")
pytestmark = pytest.mark.timeout(2 * START_TIMEOUT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 128, which every backend has."""
    return checkpoints.make_qwen3_moe(tmp_path_factory.mktemp("heads") / "model", hidden_size=512)


@dataclass(frozen=True)
class Split:
    """One backend's stock server, and one attention server for each number of micro-batches."""

    bound: float  # of the distance of logprobs
    stock: Server
    attn: dict[str, Server]


@pytest.fixture(scope="module", params=BOUNDS)
def split(start: Start, model: Path, request: pytest.FixtureRequest) -> Iterator[Split]:
    """All on one GPU, with deterministic inference, so that a cut changes no bit."""
    backend = cast(str, request.param)
    common = (
        *("--model-path", str(model), "--dtype", "bfloat16", "--enable-deterministic-inference"),
        *("--attention-backend", backend, "--sampling-backend", "pytorch"),
    )
    stock = start("sglang.launch_server", *common, *FLAGS, *NO_GRAPHS)
    mlp = start("sglang_afd.launch_server", "--role", "mlp", *common)
    attn = {
        number: start(
            *("sglang_afd.launch_server", "--role", "attn", *common, *FLAGS),
            *("--afd-mlp", mlp.url, "--afd-num-micro-batches", number),
        )
        for number in NUMBERS
    }
    with running([stock, mlp, *attn.values()]):
        stock.wait("/health", timeout_s=START_TIMEOUT_S)
        for server in attn.values():
            server.wait("/afd/v1/status", lambda body: body["state"] == "ready", START_TIMEOUT_S)
        yield Split(bound=BOUNDS[backend], stock=stock, attn=attn)


def test_micro_batches_change_no_token_on_a_gpu(split: Split) -> None:
    expected = ask_one_by_one(split.stock.url, PROMPTS[:3]), ask_at_once([split.stock.url])

    for number, server in split.attn.items():
        got = ask_one_by_one(server.url, PROMPTS[:3]), ask_at_once([server.url])

        assert differences(expected[0], got[0], bound=split.bound) == [], f"{number}, one by one"
        assert differences(expected[1], got[1], bound=split.bound) == [], f"{number}, at once"
        steps = server.get("/afd/v1/status")[1]["steps_by_num_micro_batches"]
        assert steps[number] > 0, steps
