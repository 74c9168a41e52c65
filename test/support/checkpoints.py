"""Tiny random checkpoints with a tokenizer, made in seconds, and faults planted in them.

Unlike the embedded model their experts compute different functions, so a token that reaches the
wrong expert, or loses one, changes the output. All of it is deterministic in the seed.

transformers 5.12 writes the number of experts as `num_experts` for Qwen2-MoE and as
`num_local_experts` for Qwen3-MoE; its config classes accept both, and so must any reader of ours.
SGLang 0.5.17 treats every layer of both models as sparse: `mlp_only_layers` and
`decoder_sparse_step` make checkpoints that only transformers can run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# NOTE: before transformers, which cannot import torchvision on a machine without CUDA otherwise.
import sglang_afd.upstream.cpu_shim  # noqa: F401

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "attention servers keep the cache and the norms, expert servers keep the experts",
    "system user assistant: say hello to the world, count 1 2 3 4 5 6 7 8 9 0",
    "every token goes to a few experts and their answers come back as one sum",
)
_VOCAB_SIZE = 512

# Measured over 12 prompts and seeds: with transformers' 0.02, or 0.06 everywhere, exchanging two
# experts moves the logits by a thousandth; with these it moves them by about twice their standard
# deviation, every greedy text changes, and none runs into one repeated token.
_EMBEDDING_STD = 1.0
_EXPERT_STD = 0.16
_WEIGHT_STD = 0.08

_EXPERT_NAME = re.compile(r"\.layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<expert>\d+)\.")


def make_qwen3_moe(
    out: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_experts: int = 16,
    top_k: int = 4,
    num_layers: int = 4,
    hidden_size: int = 128,
    moe_intermediate_size: int = 64,
    max_shard_size: str = "5GB",
    mlp_only_layers: tuple[int, ...] = (),
) -> Path:
    """Write a Qwen3-MoE checkpoint; every layer is sparse unless named in mlp_only_layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_common_config(num_layers, hidden_size),
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=moe_intermediate_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=list(mlp_only_layers),
        head_dim=hidden_size // 4,
    )
    return _save(Qwen3MoeForCausalLM(config), out, seed, dtype, max_shard_size)


def make_qwen2_moe_shared_expert(
    out: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_experts: int = 8,
    top_k: int = 2,
    num_layers: int = 4,
    hidden_size: int = 128,
    moe_intermediate_size: int = 64,
    shared_expert_intermediate_size: int = 96,
    decoder_sparse_step: int = 1,
    mlp_only_layers: tuple[int, ...] = (),
    max_shard_size: str = "500KB",
) -> Path:
    """Write a Qwen2-MoE checkpoint with a shared expert, in several shards.

    The small shards leave files that hold experts only, files without any, and mixed ones.
    """
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        **_common_config(num_layers, hidden_size),
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=moe_intermediate_size,
        shared_expert_intermediate_size=shared_expert_intermediate_size,
        norm_topk_prob=False,
        decoder_sparse_step=decoder_sparse_step,
        mlp_only_layers=list(mlp_only_layers),
    )
    return _save(Qwen2MoeForCausalLM(config), out, seed, dtype, max_shard_size)


def make_dense(
    out: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_layers: int = 2,
    hidden_size: int = 128,
) -> Path:
    """Write a Qwen3 checkpoint without experts: what AFD has nothing to do for."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_common_config(num_layers, hidden_size), head_dim=hidden_size // 4)
    return _save(Qwen3ForCausalLM(config), out, seed, dtype, "5GB")


def expert_tensor_names(path: Path) -> list[str]:
    """Names of the routed experts' tensors in a checkpoint, sorted."""
    return sorted(name for name in tensor_files(path) if _EXPERT_NAME.search(name))


def tensor_files(path: Path) -> dict[str, str]:
    """The file that holds each tensor of a checkpoint, by the tensor's name."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return dict(json.loads(index.read_text())["weight_map"])
    with safe_open(path / "model.safetensors", framework="pt") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


def swap_experts(src: Path, dst: Path, layer_id: int, a: int, b: int) -> Path:
    """Copy a checkpoint with the weights of two experts of one layer exchanged.

    The router is left as it is, so tokens meant for a reach b: the fault of a wrong placement.

    Args:
        src: A checkpoint of this module, or any with per-expert tensors in the Qwen naming.
        dst: Directory to create.
        layer_id: Layer whose experts are exchanged.
        a: Expert id, different from b.
        b: Expert id.
    """
    names = [n for n in expert_tensor_names(src) if _expert_of(n) == (layer_id, a)]
    if not names or a == b:
        raise ValueError(f"{src} has no two experts {a} and {b} in layer {layer_id}")
    partner = {name: name.replace(f".experts.{a}.", f".experts.{b}.") for name in names}
    partner |= {other: name for name, other in partner.items()}
    return _rewrite(src, dst, partner)


def _expert_of(name: str) -> tuple[int, int]:
    match = _EXPERT_NAME.search(name)
    assert match is not None, f"{name} is not an expert's tensor"
    return int(match["layer"]), int(match["expert"])


def _rewrite(src: Path, dst: Path, source_names: Mapping[str, str]) -> Path:
    """Copy a checkpoint, taking the tensors named on the left from the names on the right."""
    files = tensor_files(src)
    shutil.copytree(src, dst)
    for file_name in {files[name] for name in source_names}:
        own_names = [name for name, file in files.items() if file == file_name]
        tensors = {n: _read(src, files, source_names.get(n, n)) for n in own_names}
        save_file(tensors, dst / file_name, metadata={"format": "pt"})
    return dst


def _read(path: Path, files: Mapping[str, str], name: str) -> torch.Tensor:
    with safe_open(path / files[name], framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _common_config(num_layers: int, hidden_size: int) -> dict[str, Any]:
    tokenizer = _tokenizer()
    return {
        # NOTE: exactly the tokenizer's: an id beyond it would decode to nothing.
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 10, trainer)
    return tokenizer


def _save(model: Any, out: Path, seed: int, dtype: str, max_shard_size: str) -> Path:
    from transformers import PreTrainedTokenizerFast

    _randomise(model, torch.Generator().manual_seed(seed))
    model.to(getattr(torch, dtype)).save_pretrained(out, max_shard_size=max_shard_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return out


@torch.no_grad()
def _randomise(model: Any, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if "embed" in name:
            parameter.normal_(0.0, _EMBEDDING_STD, generator=generator)
        elif ".experts." in name:
            parameter.normal_(0.0, _EXPERT_STD, generator=generator)
        elif parameter.dim() > 1 or name.endswith(".bias"):
            parameter.normal_(0.0, _WEIGHT_STD, generator=generator)
