"""The fields of published config.json files that the planner needs, for models it is tested on.

Source: the config.json of each repository on Hugging Face; only the fields read by hf_config.
"""

from __future__ import annotations

from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.planner.hf_config import shape_from_config
from sglang_afd.planner.shape import ModelShape

_FP8 = {"quantization_config": {"quant_method": "fp8"}}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-235B-A22B": {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
    },
    "MiniMax-M2.5": {
        "num_hidden_layers": 62,
        "hidden_size": 3072,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "intermediate_size": 1536,
        "vocab_size": 200064,
        **_FP8,
    },
    "GLM-4.5": {
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "hidden_size": 5120,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 160,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "intermediate_size": 12288,
        "vocab_size": 151552,
    },
    "Qwen3.5-397B-A17B": {
        "num_hidden_layers": 60,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 1024,
        "moe_intermediate_size": 1024,
        "vocab_size": 248320,
    },
    "Kimi-K2": {
        "num_hidden_layers": 61,
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18432,
        "vocab_size": 163840,
        **_FP8,
    },
    "DeepSeek-V3": {
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18432,
        "vocab_size": 129280,
        **_FP8,
    },
}


def known_shape(name: str) -> ModelShape:
    """By name, with or without an organisation in front and `-FP8` behind.

    Raises: ConfigError, when the name is not in the list.
    """
    base = name.rsplit("/", 1)[-1]
    plain = base.removesuffix("-FP8")
    config = CONFIGS.get(plain)
    if config is None:
        raise ConfigError(
            f"model {name!r} is not in the planner's list ({', '.join(sorted(CONFIGS))}); "
            "give the path of its config.json"
        )
    return shape_from_config({**config, **_FP8} if base != plain else config, name=base)
