"""Shapes read from config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.model_config import EXPERT_COUNT_KEYS
from sglang_afd.planner.hf_config import read_shape, shape_from_config
from sglang_afd.planner.known_models import CONFIGS, known_shape

QWEN = CONFIGS["Qwen3-235B-A22B"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-235B-A22B", 235),
        ("Qwen3-30B-A3B", 30.5),
        ("MiniMax-M2.5", 229),
        ("DeepSeek-V3", 671),
        ("GLM-4.5", 355),
        ("Qwen3.5-397B-A17B", 397),
        ("Kimi-K2", 1026),
    ],
)
def test_the_weights_add_up_to_the_published_parameters(name: str, billions: float) -> None:
    shape = known_shape(name)
    embedding_and_head = 2 * shape.vocab_size * shape.hidden_size
    plain = shape.num_layers - shape.num_moe_layers
    parameters = (
        shape.all_expert_bytes / shape.weight_bytes
        + shape.num_moe_layers * (shape.dense_weights + shape.router_weights)
        + plain * shape.attention_weights
        + plain * shape.plain_mlp_bytes / shape.weight_bytes
        + embedding_and_head
    )

    assert parameters / 1e9 == pytest.approx(billions, rel=0.015)


def test_the_cache_of_qwen_is_the_published_one() -> None:
    assert known_shape("Qwen/Qwen3-235B-A22B-FP8").kv_bytes_per_token == 192_512


def test_latent_attention_caches_one_latent() -> None:
    assert known_shape("DeepSeek-V3").kv_elements_per_token == 576


def test_linear_attention_layers_have_no_cache() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

    shape = shape_from_config({**QWEN, "num_hidden_layers": 4, "layer_types": kinds}, "hybrid")

    assert shape.num_kv_layers == 1


def test_a_folder_with_a_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": QWEN}))

    shape = read_shape(tmp_path)

    assert (shape.num_experts, shape.weight_bytes) == (128, 2.0)


@pytest.mark.parametrize("key", EXPERT_COUNT_KEYS)
def test_the_experts_are_counted_under_every_name_that_servers_know(key: str) -> None:
    config = {name: value for name, value in QWEN.items() if name != "num_experts"}

    assert shape_from_config({**config, key: 60}, "renamed").num_experts == 60


def test_the_fields_of_ernie_are_read() -> None:
    config = {name: value for name, value in QWEN.items() if "experts" not in name}
    ernie = {
        "num_hidden_layers": 28,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 27,
        "moe_layer_interval": 2,
    }

    shape = shape_from_config({**config, **ernie}, "ernie")

    assert (shape.num_experts, shape.experts_per_token) == (64, 6)
    assert shape.num_moe_layers == 14
    assert shape.shared_intermediate_size == 2 * shape.moe_intermediate_size


def test_the_quantization_of_the_text_half_counts() -> None:
    half = {**QWEN, "quantization_config": {"quant_method": "fp8"}}

    assert shape_from_config({"text_config": half}, "composite").weight_bytes == 1


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "num_experts", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in QWEN.items() if key != field}

    with pytest.raises(ConfigError, match=field):
        shape_from_config(config, "broken")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "above 0"),
        ({"num_hidden_layers": -94}, "above 0"),
        ({"hidden_size": "4096"}, "whole number"),
        ({"num_experts_per_tok": 256}, "swapped"),
        ({"quantization_config": {"quant_method": "mystery"}}, "mystery"),
    ],
)
def test_an_impossible_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from_config({**QWEN, **change}, "broken")


def test_an_unknown_model_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        known_shape("Nobody-7B")


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="readable"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    "odd",
    [
        {"num_key_value_heads": "x"},
        {"head_dim": [1]},
        {"mlp_only_layers": ["a"]},
        {"mlp_only_layers": 3},
        {"decoder_sparse_step": -1},
        {"full_attention_interval": "often"},
        {"n_shared_experts": 1.5},
        {"quantization_config": {"bits": "many"}},
        {"first_k_dense_replace": 10**9},
    ],
)
def test_an_odd_field_of_a_config_is_refused_by_the_models_name(odd: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="odd one"):
        shape_from_config({**CONFIGS["Qwen3-30B-A3B"], **odd}, name="odd one")
