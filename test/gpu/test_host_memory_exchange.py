"""Both roles on one GPU, rows through host memory: what stock SGLang answers on that GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import checkpoints
import pytest
from compare import PROMPTS, ask_at_once, ask_one_by_one, differences
from gpu_servers import FLAGS, NO_GRAPHS, START_TIMEOUT_S, Start
from servers import Server, running

# Deterministic inference makes a row's result independent of the rows beside it, so that a batch
# cut into pieces can agree to the last bit; SGLang's other RMSNorm for CUDA has no float32, too.
COMMON = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    "--enable-deterministic-inference",
)
pytestmark = pytest.mark.timeout(2 * START_TIMEOUT_S)


@dataclass(frozen=True)
class Case:
    """A checkpoint, how it is served, and how far logprobs may be apart."""

    make_model: Callable[..., Path]
    dtype: str
    num_ranks: int
    hidden_size: int  # of four heads
    bound: float

    def __str__(self) -> str:
        return f"{self.make_model.__name__}-{self.dtype}-{self.num_ranks}"


# One rank adds the experts' outputs as stock SGLang does. Two ranks add them in another order, and
# SGLang's MoE kernel rounds to float16 what it computes in float32, which makes such a difference
# larger in the layers that follow; a top-k weight one percent off moves logprobs by 1e-2 and more.
#
# Heads of 64 for bfloat16, where SGLang's Qwen3-MoE has no rotary kernel for smaller ones; of 32
# for float32, which have a kernel of any type.
FAMILIES = (checkpoints.make_qwen3_moe, checkpoints.make_qwen2_moe_shared_expert)
CASES = [
    Case(make_model, dtype, num_ranks, hidden_size, bound)
    for dtype, num_ranks, hidden_size, bound in (
        ("bfloat16", 1, 256, 0.0),
        ("float32", 2, 128, 2e-3),
    )
    for make_model in FAMILIES
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """What the servers of a test serve."""
    return cast(Case, request.param)


@pytest.fixture(scope="module")
def fleet(
    start: Start, case: Case, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Stock SGLang, and an attention server with its MLP ranks, all at once on one GPU."""
    model = case.make_model(tmp_path_factory.mktemp("case") / "model", hidden_size=case.hidden_size)
    common = ("--model-path", str(model), "--dtype", case.dtype, *COMMON)
    stock = start("sglang.launch_server", *common, *FLAGS, *NO_GRAPHS)
    afd = (*common, "--afd-max-rows", "48")
    size = ("--ep-size", str(case.num_ranks))
    ranks: list[Server] = []
    for rank in range(case.num_ranks):
        leader = ("--afd-leader", ranks[0].url) if ranks else ()
        argv = ("--role", "mlp", *afd, *size, "--afd-ep-rank", str(rank), *leader)
        ranks.append(start("sglang_afd.launch_server", *argv))
    argv = ("--role", "attn", *afd, *FLAGS, "--afd-mlp", ranks[0].url)
    attn = start("sglang_afd.launch_server", *argv)
    with running([stock, *ranks, attn]):
        stock.wait("/health", timeout_s=START_TIMEOUT_S)
        attn.wait("/afd/v1/status", lambda body: body["state"] == "ready", START_TIMEOUT_S)
        yield stock, attn


def test_the_split_model_is_token_identical_on_a_gpu(
    fleet: tuple[Server, Server], case: Case
) -> None:
    stock, attn = fleet

    one_by_one = ask_one_by_one(stock.url, PROMPTS[:6]), ask_one_by_one(attn.url, PROMPTS[:6])
    at_once = ask_at_once([stock.url]), ask_at_once([attn.url])

    assert differences(*one_by_one, bound=case.bound) == []
    assert differences(*at_once, bound=case.bound) == []
