from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import QWEN2_57B, QWEN3_30B, QWEN3_235B_FP8

from sglang_afd.errors import ConfigError
from sglang_afd.fleet.flags import Flags
from sglang_afd.fleet.model_size import ModelSize, model_size

GB = 10**9


def write_model(directory: Path, config: dict[str, Any], **shards: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name, tensors in shards.items():
        header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
        shard = directory / f"{name}.safetensors"
        shard.write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


def dummy(directory: Path, config: dict[str, Any], *argv: str) -> ModelSize:
    flags = Flags(argv=("--load-format", "dummy", *argv))
    return model_size(write_model(directory / "model", config), flags)


def tensor(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}


def test_qwen3_30b_has_58_gb_of_experts_in_bfloat16_and_61_gb_in_all(tmp_path: Path) -> None:
    size = dummy(tmp_path, QWEN3_30B)

    assert size.rank_bytes(1) == 48 * 128 * 3 * 2048 * 768 * 2
    assert size.rank_bytes(1) / GB == pytest.approx(58.0, abs=0.05)
    # 30,532,122,624 parameters, as the model's card counts them.
    assert size.rank_bytes(1) + size.attention_bytes == 30_532_122_624 * 2
    assert size.kv_bytes_per_token == 2 * 48 * 4 * 128 * 2
    assert (size.num_layers, size.top_k, size.context_length) == (48, 8, 40960)


def test_qwen3_235b_in_fp8_has_a_byte_for_each_weight_and_a_scale_for_each_block(
    tmp_path: Path,
) -> None:
    size = dummy(tmp_path, QWEN3_235B_FP8)

    weights = 94 * 128 * 3 * 4096 * 1536
    assert size.rank_bytes(1) == weights + weights // (128 * 128) * 4
    assert size.rank_bytes(2) == size.rank_bytes(1) // 2
    assert size.rank_bytes(1) / GB == pytest.approx(227.2, abs=0.05)
    # 71.3 million projections a layer at a byte, two tables of 151936 x 4096 at two.
    assert size.attention_bytes / GB == pytest.approx(6.70 + 2.49 + 0.10, abs=0.02)
    assert size.is_fp8


def test_a_shared_expert_belongs_to_attention(tmp_path: Path) -> None:
    size = dummy(tmp_path, QWEN2_57B)

    # 57.4 billion parameters, as the model's card counts them.
    assert (size.rank_bytes(1) + size.attention_bytes) / 2 / GB == pytest.approx(57.4, abs=0.02)
    assert size.rank_bytes(1) == 28 * 64 * 3 * 3584 * 2560 * 2


def test_places_of_phantom_experts_take_memory_too(tmp_path: Path) -> None:
    size = dummy(tmp_path, QWEN3_30B)

    assert size.rank_bytes(3) == 43 * size.expert_bytes


def test_flags_change_what_is_loaded(tmp_path: Path) -> None:
    plain = dummy(tmp_path, QWEN3_30B)
    overrides = json.dumps({"num_hidden_layers": 12})

    size = dummy(
        tmp_path,
        QWEN3_30B,
        "--json-model-override-args",
        overrides,
        "--dtype=float32",
        "--kv-cache-dtype",
        "fp8_e4m3",
        "--context-length",
        "1000",
    )

    assert size.rank_bytes(1) == plain.rank_bytes(1) // 4 * 2
    assert size.kv_bytes_per_token == plain.kv_bytes_per_token // 4 // 2
    assert size.context_length == 1000


def test_tensors_are_counted_from_the_headers_in_the_dtype_they_are_loaded_as(
    tmp_path: Path,
) -> None:
    config = QWEN3_30B | {"num_hidden_layers": 1, "num_experts": 2, "tie_word_embeddings": True}
    model = write_model(
        tmp_path / "model",
        config,
        a={
            "model.embed_tokens.weight": tensor("F32", 100, 10),
            "lm_head.weight": tensor("F32", 100, 10),  # tied, so it is not loaded
            "model.layers.0.mlp.shared_expert.up_proj.weight": tensor("BF16", 10, 10),
            "model.layers.1.self_attn.o_proj.weight": tensor("BF16", 10, 10),  # not served
        },
        b={
            "model.layers.0.mlp.experts.0.up_proj.weight": tensor("F8_E4M3", 10, 10),
            "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv": tensor("F32", 5),
            "model.layers.0.mlp.experts.1.up_proj.weight": tensor("F8_E4M3", 10, 10),
            "model.layers.0.mlp.experts.1.up_proj.weight_scale_inv": tensor("F32", 5),
        },
    )

    size = model_size(model, Flags(argv=()))

    assert size.attention_bytes == 100 * 10 * 2 + 10 * 10 * 2
    assert size.rank_bytes(1) == 2 * (100 + 20)
    assert size.expert_bytes == 120


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 512}, "the cache of Qwen3MoeForCausalLM has a form"),
        ({"architectures": ["OtherForCausalLM"]}, "the layers of OtherForCausalLM are not known"),
        ({"num_experts": None}, "has no experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised in a way"),
        ({"hidden_size": "big"}, "says hidden_size = 'big'"),
    ],
)
def test_what_is_not_known_is_an_error_and_no_guess(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dummy(tmp_path, QWEN3_30B | change)


def test_a_shard_without_a_header_is_an_error(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN3_30B)
    (model / "a.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header")

    with pytest.raises(ConfigError, match="has no safetensors header"):
        model_size(model, Flags(argv=()))
