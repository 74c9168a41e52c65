"""Model directories made on the spot: a config and a tokenizer, weights by seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
}
_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A shape, and what its logits may differ by."""

    config: dict[str, Any]
    cases: str  # measured unless told otherwise
    logits_bound: float  # see logits.py
    moe_runner_backend: str  # "" leaves it to SGLang


MODELS = {
    "qwen3-30b": Model(
        config={
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "torch_dtype": "bfloat16",
            "vocab_size": 151936,
        },
        cases="64x1024,128x1024,256x1024,128x2048",
        logits_bound=0.05,
        moe_runner_backend="",
    ),
    "qwen3-235b-fp8": Model(
        config={
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 8,  # of 94
            "num_key_value_heads": 4,
            "quantization_config": _FP8,
            "torch_dtype": "bfloat16",
            "vocab_size": 151936,
        },
        cases="128x1024",
        logits_bound=0.1,
        moe_runner_backend="deep_gemm",
    ),
    "tiny": Model(
        config={
            "head_dim": 128,
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "num_attention_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "torch_dtype": "float32",
            "vocab_size": 2048,
        },
        cases="32x64",
        logits_bound=1e-4,
        moe_runner_backend="",
    ),
}


def write_model(directory: Path, name: str, *, num_layers: int = 0, dtype: str = "") -> Path:
    """Write a model without weights.

    Args:
        directory: Is made.
        name: A key of `MODELS`.
        num_layers: Instead of the shape's own; 0 keeps them.
        dtype: Instead of the shape's own; "" keeps it.
    """
    config = _QWEN3_MOE | MODELS[name].config
    if num_layers:
        config["num_hidden_layers"] = num_layers
    if dtype:
        config["torch_dtype"] = dtype
    config |= {
        "max_window_layers": config["num_hidden_layers"],
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "unk_token": "<unk>",
                "eos_token": "<eos>",
                "model_max_length": config["max_position_embeddings"],
            }
        )
    )
    return directory


def read_config(directory: str) -> dict[str, Any]:
    """`config.json` of a model."""
    config: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    return config


def _tokenizer() -> dict[str, Any]:
    # Prompts are token ids; SGLang only wants to load one.
    words = ["<unk>", "<eos>", *(f"t{number}" for number in range(100))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: index for index, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
