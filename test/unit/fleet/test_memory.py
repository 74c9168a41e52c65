from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import QWEN3_30B, QWEN3_235B_FP8

from sglang_afd.errors import ConfigError
from sglang_afd.fleet import overheads
from sglang_afd.fleet.flags import Flags
from sglang_afd.fleet.gpus import MIB, Gpu
from sglang_afd.fleet.memory import MemoryPlan, MemoryPlanner, ServerMemory
from sglang_afd.fleet.memory_report import actual_bytes, compare, read_processes
from sglang_afd.fleet.model_size import ModelSize, model_size
from sglang_afd.fleet.overheads import GIB
from sglang_afd.fleet.placement import place

H200 = Gpu(id="GPU-0", model="NVIDIA H200", total_bytes=143771 * MIB, free_bytes=143160 * MIB)


@pytest.fixture
def qwen3_30b(tmp_path: Path) -> ModelSize:
    return size_of(tmp_path, QWEN3_30B)


def size_of(directory: Path, config: dict[str, Any], *argv: str) -> ModelSize:
    (directory / "config.json").write_text(json.dumps(config))
    return model_size(directory, Flags(argv=("--load-format", "dummy", *argv)))


def plan(
    model: ModelSize,
    *argv: str,
    attn: int = 1,
    mlp: int = 1,
    spares: int = 0,
    gpus: int = 1,
    gpu: Gpu = H200,
    has_mps: bool = True,
) -> MemoryPlan:
    return MemoryPlanner(
        model=model,
        placement=place(attn=attn, mlp=mlp, spares=spares, gpus=[gpu] * gpus),
        num_ranks=mlp,
        attn_flags=Flags(argv=argv),
        mlp_flags=Flags(argv=argv),
        has_mps=has_mps,
    ).plan()


def total(memory: MemoryPlan) -> int:
    return sum(server.num_bytes for server in memory.servers.values())


def test_one_gpu_holds_the_experts_once_and_caches_take_the_rest(qwen3_30b: ModelSize) -> None:
    memory = plan(qwen3_30b)

    mlp, attn = memory.servers["mlp-0"], memory.servers["attn-0"]
    assert mlp.items["experts"] == qwen3_30b.rank_bytes(1)
    assert attn.items["weights"] == qwen3_30b.attention_bytes
    usable = H200.free_bytes * 0.98 - overheads.MPS_SERVER_BYTES
    assert usable - GIB / 2 < total(memory) <= usable
    assert attn.num_tokens > 600_000  # some 75 GiB at 96 KiB a token


@pytest.mark.parametrize(("num_layers", "held_gib"), [(8, 9.9), (12, 14.5)])
def test_an_mlp_server_is_planned_as_large_as_it_was_on_an_h200(
    num_layers: int, held_gib: float, tmp_path: Path
) -> None:
    model = size_of(tmp_path, QWEN3_30B | {"num_hidden_layers": num_layers})

    planned = plan(model).servers["mlp-0"].num_bytes

    assert planned / GIB == pytest.approx(held_gib, rel=0.02)


def test_attention_servers_of_a_gpu_share_what_is_left_equally(qwen3_30b: ModelSize) -> None:
    one, three = plan(qwen3_30b, attn=1), plan(qwen3_30b, attn=3)

    tokens = {three.servers[f"attn-{index}"].num_tokens for index in range(3)}
    assert len(tokens) == 1
    assert total(three) <= H200.free_bytes * 0.98
    # Each pays for weights, slots and work of its own.
    assert 3 * tokens.pop() < one.servers["attn-0"].num_tokens


def test_the_last_server_to_measure_still_finds_room_for_its_cache(qwen3_30b: ModelSize) -> None:
    memory = plan(qwen3_30b, attn=2)

    # SGLang keeps 1 % of what was free before it loaded out of the cache's reach; everybody else
    # has everything by then, and this server all but its graphs and activations.
    last = memory.servers["attn-1"]
    free = H200.free_bytes - (total(memory) - last.items["KV cache"])
    free += last.items["graphs and activations"]
    assert free - 0.01 * H200.free_bytes >= last.items["KV cache"]


def test_servers_get_the_tokens_as_a_flag(qwen3_30b: ModelSize) -> None:
    memory = plan(qwen3_30b)

    tokens = memory.servers["attn-0"].num_tokens
    assert memory.flags_of("attn-0") == (
        "--max-total-tokens",
        str(tokens),
        "--mem-fraction-static",
        "0.99",
    )
    assert memory.flags_of("mlp-0") == ()
    assert memory.flags_of("router") == ()


def test_tokens_that_the_user_asks_for_are_planned(qwen3_30b: ModelSize) -> None:
    memory = plan(qwen3_30b, "--max-total-tokens", "100000")

    attn = memory.servers["attn-0"]
    assert attn.num_tokens == 100_000
    tables = overheads.request_table_bytes(overheads.MIN_REQUESTS, 40960)
    assert attn.items["KV cache"] == 100_000 * qwen3_30b.kv_bytes_per_token + tables


def test_an_attention_server_alone_on_its_gpu_is_left_to_sglang(qwen3_30b: ModelSize) -> None:
    memory = plan(qwen3_30b, gpus=2)

    assert memory.servers["attn-0"].num_tokens == 0
    assert memory.flags_of("attn-0") == ()
    assert "KV cache" not in memory.servers["attn-0"].items


def test_ranks_share_the_experts(qwen3_30b: ModelSize) -> None:
    memory = plan(qwen3_30b, mlp=2)

    for rank in range(2):
        experts = memory.servers[f"mlp-{rank}"].items["experts"]
        assert experts == qwen3_30b.rank_bytes(1) // 2


def test_a_spare_on_the_only_gpu_needs_no_experts_of_its_own(qwen3_30b: ModelSize) -> None:
    on_one = plan(qwen3_30b, mlp=1, spares=1)
    on_two = plan(qwen3_30b, mlp=2, spares=1, gpus=2)

    assert "experts" not in on_one.servers["mlp-1"].items
    # Here it may have to take the place of the rank on the other GPU.
    assert on_two.servers["mlp-2"].items["experts"] == qwen3_30b.rank_bytes(2)


def test_slots_grow_with_ranks_and_rows_and_shrink_in_fp8(qwen3_30b: ModelSize) -> None:
    def slots(*argv: str, mlp: int = 1) -> int:
        return plan(qwen3_30b, *argv, mlp=mlp).servers["attn-0"].items["slots"]

    row_bytes = 2048 * 2
    # Two slots: rows, ids and weights, and the sums of each rank.
    assert slots() == pytest.approx(2 * 2048 * (2 * row_bytes + 8 * 8), rel=0.01)
    assert slots(mlp=4) == pytest.approx(2 * 2048 * (5 * row_bytes + 8 * 8), rel=0.01)
    assert slots("--afd-num-micro-batches", "1") == pytest.approx(slots() / 2, rel=0.01)
    assert slots("--afd-max-rows", "1024") == pytest.approx(slots() / 2, rel=0.01)
    assert slots("--afd-dispatch-dtype", "fp8") < slots()
    assert slots("--afd-transport", "zmq") == 0


def test_what_does_not_fit_is_one_error_that_names_every_item(tmp_path: Path) -> None:
    model = size_of(tmp_path, QWEN3_235B_FP8)

    with pytest.raises(ConfigError) as caught:
        plan(model)

    text = str(caught.value)
    assert "GPU 0 (NVIDIA H200) need" in text
    assert "with a cache of 40960 tokens each; 136.8 of 140.4 GiB can be used" in text
    assert "mlp-0 21" in text and "experts 211.6" in text
    assert "weights 8.7" in text
    assert "use a smaller --attn, `-- --context-length` or" in text


def test_eight_layers_of_the_235b_fit_on_one_gpu(tmp_path: Path) -> None:
    overrides = json.dumps({"num_hidden_layers": 8})
    model = size_of(tmp_path, QWEN3_235B_FP8, "--json-model-override-args", overrides)

    memory = plan(model)

    assert memory.servers["mlp-0"].items["experts"] / GIB == pytest.approx(18.0, abs=0.05)
    assert total(memory) <= H200.free_bytes


def test_memory_that_others_use_is_not_planned(qwen3_30b: ModelSize) -> None:
    half_used = dataclasses.replace(H200, free_bytes=H200.free_bytes // 2)

    memory = plan(qwen3_30b, gpu=half_used, has_mps=False)

    assert total(memory) <= half_used.free_bytes
    with pytest.raises(ConfigError, match="can be used"):
        plan(qwen3_30b, gpu=half_used, attn=3)


def test_a_gpu_of_unknown_memory_is_not_planned(qwen3_30b: ModelSize) -> None:
    assert plan(qwen3_30b, gpu=Gpu(id="0")).servers == {}


def test_each_server_is_told_item_by_item() -> None:
    server = ServerMemory(
        name="attn-0", items={"weights": 3 * GIB, "KV cache": 20 * GIB}, num_tokens=1000
    )

    assert server.describe() == "attn-0 23.0 GiB (weights 3.0, KV cache 20.0, 1000 tokens)"


@pytest.mark.parametrize(
    ("actual", "line"),
    [
        (109 * GIB, "memory of mlp-0: 109.0 GiB, planned 100.0 GiB (+9.0%)"),
        (89 * GIB, "warning: memory of mlp-0: 89.0 GiB, planned 100.0 GiB (-11.0%)"),
        (111 * GIB, "warning: memory of mlp-0: 111.0 GiB, planned 100.0 GiB (+11.0%)"),
        (0, "mlp-0 does not tell what it holds; planned 100.0 GiB"),
    ],
)
def test_a_server_that_is_more_than_a_tenth_off_is_marked(actual: int, line: str) -> None:
    assert compare(ServerMemory(name="mlp-0", items={"experts": 100 * GIB}), actual) == line


def test_the_driver_is_believed_before_the_server() -> None:
    memory = {"pid": 7, "total_bytes": 5 * GIB}

    assert actual_bytes(memory, {7: 9 * GIB}) == 9 * GIB
    assert actual_bytes(memory, {8: 9 * GIB}) == 5 * GIB + overheads.CONTEXT_BYTES
    assert actual_bytes({}, {}) == 0


def test_the_drivers_list_of_processes_is_read() -> None:
    assert read_processes("12, 100\n13, [N/A]\n12, 50\n\n") == {12: 150 * MIB}
