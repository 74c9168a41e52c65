"""The checkpoints that the other tests stand on: experts matter, and planted faults are real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    expert_tensor_names,
    make_dense,
    make_qwen2_moe_shared_expert,
    make_qwen3_moe,
    swap_experts,
    tensor_files,
)
from safetensors import safe_open
from torch import Tensor

PROMPTS = ("hello world", "count to 9", "the cache keeps")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_moe(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_moe_shared_expert(tmp_path_factory.mktemp("models") / "qwen2")


def read(path: Path, name: str) -> Tensor:
    with safe_open(path / tensor_files(path)[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def load(path: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def logits_of(path: Path, prompt: str) -> Tensor:
    model, tokenizer = load(path)
    logits: Tensor = model(torch.tensor([tokenizer(prompt).input_ids])).logits[0]
    return logits


@pytest.mark.parametrize(
    "make",
    [
        make_qwen3_moe,
        pytest.param(make_qwen2_moe_shared_expert, marks=pytest.mark.slow),
        pytest.param(make_dense, marks=pytest.mark.slow),
    ],
)
def test_greedy_text_varies_and_depends_on_the_prompt(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    model, tokenizer = load(make(tmp_path / "model"))
    outputs = []

    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        output = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
        outputs.append(output[0, ids.shape[1] :].tolist())

    assert model.config.vocab_size == len(tokenizer)
    for ids in outputs:
        assert len(set(ids)) >= 8, f"degenerate output {ids}"
        assert tokenizer.decode(ids)
    assert len({tuple(ids) for ids in outputs}) == len(PROMPTS)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    a = read(make_qwen3_moe(tmp_path / "a", seed=5), name)
    b = read(make_qwen3_moe(tmp_path / "b", seed=5), name)
    c = read(make_qwen3_moe(tmp_path / "c", seed=6), name)

    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_options_reach_the_checkpoint(tmp_path: Path) -> None:
    path = make_qwen3_moe(
        tmp_path / "m", dtype="bfloat16", num_experts=6, top_k=2, num_layers=2, mlp_only_layers=(0,)
    )

    names = expert_tensor_names(path)
    assert len(names) == 6 * 3
    assert all(name.startswith("model.layers.1.") for name in names)
    assert read(path, names[0]).dtype == torch.bfloat16


def test_transformers_names_the_number_of_experts_in_two_ways(qwen2: Path, qwen3: Path) -> None:
    config_of_qwen2 = json.loads((qwen2 / "config.json").read_text())
    config_of_qwen3 = json.loads((qwen3 / "config.json").read_text())

    assert config_of_qwen2["num_experts"] == 8
    assert config_of_qwen3["num_local_experts"] == 16
    assert "num_experts" not in config_of_qwen3


def test_shards_hold_experts_only_none_and_both(qwen2: Path) -> None:
    experts = set(expert_tensor_names(qwen2))
    kinds: dict[str, set[bool]] = {}
    for name, file in tensor_files(qwen2).items():
        kinds.setdefault(file, set()).add(name in experts)

    assert {frozenset(kind) for kind in kinds.values()} == {
        frozenset({True}),
        frozenset({False}),
        frozenset({True, False}),
    }


def test_the_shared_expert_is_not_counted_among_the_routed_ones(qwen2: Path) -> None:
    names = expert_tensor_names(qwen2)

    assert len(names) == 4 * 8 * 3
    assert not any("shared_expert" in name for name in names)
    assert read(qwen2, "model.layers.0.mlp.shared_expert.up_proj.weight").shape == (96, 128)


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_swapping_exchanges_two_experts_and_nothing_else(
    model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    src: Path = request.getfixturevalue(model)

    dst = swap_experts(src, tmp_path / "swapped", layer_id=2, a=0, b=7)

    assert tensor_files(dst) == tensor_files(src)
    for name in tensor_files(src):
        origin = name
        if ".layers.2.mlp.experts.0." in name:
            origin = name.replace(".experts.0.", ".experts.7.")
        elif ".layers.2.mlp.experts.7." in name:
            origin = name.replace(".experts.7.", ".experts.0.")
        assert torch.equal(read(dst, name), read(src, origin)), name


@pytest.mark.parametrize("model", [pytest.param("qwen2", marks=pytest.mark.slow), "qwen3"])
def test_a_swapped_expert_changes_the_logits(
    model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    src: Path = request.getfixturevalue(model)
    prompt = " ".join(PROMPTS)  # enough tokens for both experts to be chosen

    dst = swap_experts(src, tmp_path / "swapped", layer_id=0, a=1, b=3)

    difference = (logits_of(src, prompt) - logits_of(dst, prompt)).abs().max()
    assert difference > 0.5, "a test that compares outputs could not see this fault"


def test_swapping_what_is_not_there_is_refused(qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no two experts 1 and 1 in layer 0"):
        swap_experts(qwen3, tmp_path / "a", layer_id=0, a=1, b=1)
    with pytest.raises(ValueError, match="no two experts 0 and 1 in layer 9"):
        swap_experts(qwen3, tmp_path / "b", layer_id=9, a=0, b=1)


def test_a_dense_checkpoint_has_no_experts(tmp_path: Path) -> None:
    assert expert_tensor_names(make_dense(tmp_path / "dense")) == []
