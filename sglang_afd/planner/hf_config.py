"""Reads a ModelShape from a Hugging Face config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.model_config import EXPERT_COUNT_KEYS
from sglang_afd.planner import checks
from sglang_afd.planner.json_file import read_json
from sglang_afd.planner.shape import ModelShape

# The same size under the names that the model families use; the first one found counts.
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_MOE_INTERMEDIATE = ("moe_intermediate_size", "intermediate_size")
_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED_COUNTS = ("n_shared_experts", "moe_num_shared_experts")


def read_shape(path: Path) -> ModelShape:
    """The shape of the model whose config.json, or folder with one, is at this path."""
    file = path / "config.json" if os.path.isdir(path) else path
    config = read_json(file, "config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: holds a {type(config).__name__}, wanted a JSON object")
    return shape_from_config(config, name=str(config.get("_name_or_path") or file.parent.name))


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a parsed config.json describes.

    Args:
        config: As parsed; the sizes may sit under `text_config`, as multimodal models have them.
        name: For messages and reports.
    Raises: ConfigError, naming the missing field.
    """
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, Mapping) else config
    num_layers = _whole(fields, name, "num_hidden_layers")
    hint = "No model has so many layers."
    checks.between(f"config of {name}", "num_hidden_layers", num_layers, 1, 1e5, hint)
    hidden_size = _whole(fields, name, "hidden_size")
    num_experts = _whole(fields, name, *EXPERT_COUNT_KEYS)
    attention = _latent_attention if fields.get("kv_lora_rank") else _grouped_attention
    attention_weights, kv_elements, core_flops = attention(fields, name, hidden_size)
    moe_intermediate = _whole(fields, name, *_MOE_INTERMEDIATE)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        num_moe_layers=num_layers - _plain_layers(fields, name, num_layers),
        num_kv_layers=_kv_layers(fields, name, num_layers),
        hidden_size=hidden_size,
        num_experts=num_experts,
        experts_per_token=_whole(fields, name, *_TOPK),
        moe_intermediate_size=moe_intermediate,
        shared_intermediate_size=_shared_intermediate(fields, name, moe_intermediate),
        dense_intermediate_size=_count(fields, name, "intermediate_size", 0),
        attention_weights=attention_weights,
        kv_elements_per_token=kv_elements,
        core_flops_per_cached_token=core_flops,
        vocab_size=_whole(fields, name, "vocab_size"),
        weight_bytes=_weight_bytes(fields, name),
    )


def _whole(fields: Mapping[str, Any], name: str, *keys: str) -> int:
    for key in keys:
        value = fields.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(
                f"config of {name}: {key} is {value!r}, wanted a whole number above 0"
            )
        return value
    raise ConfigError(
        f"config of {name}: has no {' or '.join(keys)}; the planner needs the config.json "
        "of a mixture-of-experts model"
    )


def _count(fields: Mapping[str, Any], name: str, key: str, default: int) -> int:
    """Like _whole, where the field may be missing, or 0 for none."""
    return _whole(fields, name, key) if fields.get(key) else default


def _grouped_attention(
    fields: Mapping[str, Any], name: str, hidden_size: int
) -> tuple[int, int, int]:
    heads = _whole(fields, name, "num_attention_heads")
    kv_heads = _count(fields, name, "num_key_value_heads", heads)
    head_dim = _count(fields, name, "head_dim", hidden_size // heads)
    weights = hidden_size * head_dim * (2 * heads + 2 * kv_heads)
    return weights, 2 * kv_heads * head_dim, 4 * heads * head_dim


def _latent_attention(
    fields: Mapping[str, Any], name: str, hidden_size: int
) -> tuple[int, int, int]:
    """Multi-head latent attention: the cache holds one latent, and decode works on it directly."""
    heads = _whole(fields, name, "num_attention_heads")
    kv_rank = _whole(fields, name, "kv_lora_rank")
    rope, nope = _whole(fields, name, "qk_rope_head_dim"), _whole(fields, name, "qk_nope_head_dim")
    value = _whole(fields, name, "v_head_dim")
    q_rank = _count(fields, name, "q_lora_rank", 0)
    queries = heads * (nope + rope)
    q_weights = q_rank * (hidden_size + queries) if q_rank else hidden_size * queries
    kv_weights = hidden_size * (kv_rank + rope) + kv_rank * heads * (nope + value)
    weights = q_weights + kv_weights + heads * value * hidden_size
    return weights, kv_rank + rope, 2 * heads * (2 * kv_rank + rope)


def _plain_layers(fields: Mapping[str, Any], name: str, num_layers: int) -> int:
    only = fields.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(type(layer) is int for layer in only):
        raise ConfigError(f"config of {name}: mlp_only_layers is {only!r}, wanted layer numbers")
    first = min(_count(fields, name, "first_k_dense_replace", 0), num_layers)
    plain = set(range(first)) | set(only) & set(range(num_layers))
    step = _count(fields, name, "decoder_sparse_step", 1)
    plain |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return len(plain | _outside_a_range(fields, name, num_layers))


def _outside_a_range(fields: Mapping[str, Any], name: str, num_layers: int) -> set[int]:
    """Layers without experts, where they are given as a range with an interval, as in ERNIE 4.5."""
    first = _count(fields, name, "moe_layer_start_index", 0)
    last = _count(fields, name, "moe_layer_end_index", num_layers - 1)
    interval = _count(fields, name, "moe_layer_interval", 1)
    return set(range(num_layers)) - set(range(first, min(last, num_layers - 1) + 1, interval))


def _kv_layers(fields: Mapping[str, Any], name: str, num_layers: int) -> int:
    types = fields.get("layer_types")
    if isinstance(types, list) and types:
        return sum("linear" not in str(kind) for kind in types)
    every = _count(fields, name, "full_attention_interval", 1)
    return num_layers // every


def _shared_intermediate(fields: Mapping[str, Any], name: str, moe_intermediate: int) -> int:
    for key in _SHARED:
        if fields.get(key):
            return _whole(fields, name, key)
    number = sum(_count(fields, name, key, 0) for key in _SHARED_COUNTS)
    return number * moe_intermediate


def _weight_bytes(fields: Mapping[str, Any], name: str) -> float:
    quantization = fields.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = str(quantization.get("quant_method", "")).lower()
        if "fp8" in method:
            return 1.0
        if quantization.get("bits"):
            return _whole(quantization, name, "bits") / 8
        if "mxfp4" in method or "fp4" in method:
            return 0.5
        raise ConfigError(
            f"config of {name}: quantization {method!r} is unknown to the planner, which knows "
            "fp8, fp4 and those that give `bits`; set ModelShape.weight_bytes yourself"
        )
    return 4.0 if str(fields.get("torch_dtype") or fields.get("dtype")) == "float32" else 2.0
