"""A random Qwen3-MoE checkpoint without a tokenizer: every layer sparse, so small that its own
computing hardly shows beside the planted delays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 256
HIDDEN = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
EXPERTS, TOP_K, EXPERT_HIDDEN = 4, 2, 32
SEED = 0


def write_model(directory: Path, num_layers: int) -> Path:
    """Write config and weights."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": EXPERT_HIDDEN,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    random = np.random.default_rng(SEED)
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.normal(0.0, 0.1, shape).astype(np.float32)
        for name, shape in _shapes(num_layers)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _shapes(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (HIDDEN,)
        yield at + "post_attention_layernorm.weight", (HIDDEN,)
        yield at + "self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield at + "self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield at + "self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield at + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield at + "self_attn.q_norm.weight", (HEAD_DIM,)
        yield at + "self_attn.k_norm.weight", (HEAD_DIM,)
        yield at + "mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            mlp = f"{at}mlp.experts.{expert}."
            yield mlp + "gate_proj.weight", (EXPERT_HIDDEN, HIDDEN)
            yield mlp + "up_proj.weight", (EXPERT_HIDDEN, HIDDEN)
            yield mlp + "down_proj.weight", (HIDDEN, EXPERT_HIDDEN)
