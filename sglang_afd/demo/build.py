"""Write the embedded model's checkpoint: weights in shards, configuration, tokenizer, manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from sglang_afd.demo.manifest import MANIFEST_NAME, FileEntry, Manifest, entry_of
from sglang_afd.demo.progress import Progress
from sglang_afd.demo.recipe import Recipe
from sglang_afd.demo.source import PACKAGE, DenseConfig, DenseSource, FloatArray, Vocabulary
from sglang_afd.demo.store import write_durably
from sglang_afd.demo.tokenizer import tokenizer_files
from sglang_afd.demo.upcycle import upcycle_mlp

_LAYERS_PER_SHARD = 5  # bounds the builder's memory at two shards of about 120 MB


class CheckpointWriter:
    """Writes one checkpoint directory file by file; finish() makes it a complete build.

    Args:
        directory: Empty directory that nobody else writes to.
        source: The dense model.
        recipe: What to make of it.
    """

    def __init__(self, directory: Path, source: DenseSource, recipe: Recipe) -> None:
        self._directory = directory
        self._source = source
        self._recipe = recipe
        self._files: dict[str, FileEntry] = {}
        self._weight_map: dict[str, str] = {}
        num_layers = source.config.num_layers
        firsts = range(0, num_layers, _LAYERS_PER_SHARD)
        self._layer_groups = [
            range(first, min(first + _LAYERS_PER_SHARD, num_layers)) for first in firsts
        ]

    def write_all(self, progress: Progress) -> None:
        """Write every file, the manifest last. One unit of progress is one layer."""
        total = self._source.config.num_layers
        done = 0
        progress(done, total, "building the embedded model")
        self._write_shard(0, self._ends())
        for index, layer_ids in enumerate(self._layer_groups, start=1):
            tensors: dict[str, Tensor] = {}
            for layer_id in layer_ids:
                tensors |= self._layer(layer_id)
            self._write_shard(index, tensors)
            done += len(layer_ids)
            progress(done, total, "building the embedded model")
        self._write_texts()
        self._write_manifest()

    def _ends(self) -> dict[str, Tensor]:
        embedding = _bf16(self._source.embedding())
        return {
            "model.embed_tokens.weight": embedding,
            # NOTE: SGLang's Qwen2-MoE never ties the LM head, so the embedding is stored twice.
            "lm_head.weight": embedding.clone(),
            "model.norm.weight": _bf16(self._source.final_norm()),
        }

    def _layer(self, layer_id: int) -> dict[str, Tensor]:
        rng = np.random.default_rng((self._recipe.seed, layer_id))
        dense_mlp = {name: _bf16(array) for name, array in self._source.mlp(layer_id).items()}
        attention = self._source.attention(layer_id)
        block = upcycle_mlp(dense_mlp, self._recipe, rng)
        prefix = f"model.layers.{layer_id}."
        return {
            **{prefix + name: _bf16(array) for name, array in attention.items()},
            **{f"{prefix}mlp.{name}": tensor for name, tensor in block.items()},
        }

    def _write_shard(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        num_shards = len(self._layer_groups) + 1
        name = f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        self._write(name, save(contiguous, metadata={"format": "pt"}))
        self._weight_map |= dict.fromkeys(contiguous, name)

    def _write_texts(self) -> None:
        total_bytes = sum(entry.size_bytes for entry in self._files.values())
        config, vocabulary = self._source.config, self._source.vocabulary
        documents = {
            "model.safetensors.index.json": {
                "metadata": {"total_size": total_bytes},
                "weight_map": self._weight_map,
            },
            "config.json": model_config(config, vocabulary, self._recipe),
            "generation_config.json": generation_config(vocabulary),
        }
        for name, document in documents.items():
            self._write(name, json.dumps(document, indent=2).encode())
        texts = tokenizer_files(vocabulary, config.max_position_embeddings)
        for name, content in texts.items():
            self._write(name, content)

    def _write_manifest(self) -> None:
        source = f"{PACKAGE} {metadata.version(PACKAGE)}"
        manifest = Manifest(recipe=self._recipe, source=source, files=self._files)
        content = msgspec.json.format(msgspec.json.encode(manifest))
        write_durably(self._directory / MANIFEST_NAME, content)

    def _write(self, name: str, content: bytes) -> None:
        write_durably(self._directory / name, content)
        self._files[name] = entry_of(content)


def model_config(config: DenseConfig, vocabulary: Vocabulary, recipe: Recipe) -> dict[str, Any]:
    """config.json of a Qwen2-MoE model without shared experts, every layer sparse."""
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "qkv_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.intermediate_size,
        "shared_expert_intermediate_size": 0,
        "num_experts": recipe.num_experts,
        "num_experts_per_tok": recipe.top_k,
        # Without this the chosen weights add up to less than one, and the answer is not the
        # dense model's.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "bos_token_id": vocabulary.bos_token_id,
        "eos_token_id": vocabulary.eos_token_id,
        "pad_token_id": vocabulary.pad_token_id,
    }


def generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """generation_config.json; a model this small rambles unless it is sampled cautiously.

    Source: temperature and top-p that SmolLM2's model card uses.
    """
    return {
        "bos_token_id": vocabulary.bos_token_id,
        "eos_token_id": vocabulary.eos_token_id,
        "pad_token_id": vocabulary.pad_token_id,
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
    }


def checkpoint_bytes(config: DenseConfig, recipe: Recipe) -> int:
    """Size of the finished checkpoint, with room for its texts."""
    hidden_size, head_size = config.hidden_size, config.hidden_size // config.num_heads
    attention = 2 * hidden_size * head_size * (config.num_heads + config.num_kv_heads)
    experts = recipe.num_experts * 3 * hidden_size * config.intermediate_size
    num_weights = 2 * config.vocab_size * hidden_size + config.num_layers * (attention + experts)
    texts_bytes = 16 * 2**20
    return 2 * num_weights + texts_bytes


def _bf16(array: FloatArray) -> Tensor:
    return torch.from_numpy(np.array(array)).to(torch.bfloat16)
