"""Bytes of a model's weights and of its key-value cache, from its files alone.

Tensors are counted from the headers of the checkpoint; from config.json where weights are dummies.
SGLang is not asked: its import takes longer than everything else that a launcher does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.fingerprint import safetensors_files
from sglang_afd.fleet.flags import Flags
from sglang_afd.model_config import EXPERT_COUNT_KEYS, read_config
from sglang_afd.topology import ExpertShard

ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
DTYPES = {"half": "float16", "float": "float32"}  # other names of --dtype
HEADER_ITEMSIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
FLOATS = ("F32", "F16", "BF16")
# The first that a config has, in SGLang's order.
CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
DUMMY_ARCHITECTURES = ("Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM")
_EXPERT = re.compile(r"\.experts\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SCALE = re.compile(r"scale(_inv)?$")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What memory has to hold of one model, in bytes unless the name says otherwise."""

    attention_bytes: int  # every tensor but those of routed experts
    expert_bytes: int  # one routed expert, over all layers
    kv_bytes_per_token: int
    dtype: str  # of activations
    is_fp8: bool  # of expert weights
    num_experts: int
    num_layers: int
    hidden_size: int
    qkv_size: int  # values of a token's queries, keys and values in one layer
    moe_size: int  # intermediate size of one expert
    top_k: int
    vocab_size: int
    context_length: int  # tokens

    def rank_bytes(self, ep_size: int) -> int:
        """Experts of one MLP rank, places of phantom experts included."""
        shard = ExpertShard(rank=0, ep_size=ep_size, num_experts=self.num_experts)
        return shard.num_local * self.expert_bytes


def model_size(model_path: Path, flags: Flags) -> ModelSize:
    """Read the model's files.

    Args:
        model_path: The checkpoint's directory.
        flags: SGLang's, as far as they change what is loaded.

    Raises:
        ConfigError: A file is missing or broken, or the model's shape is not known to this reader.
    """
    config = _text_config(model_path, flags)
    shape = _Shape(config)
    dtype = _dtype(config, flags.text("--dtype", default="auto"))
    if flags.text("--load-format", default="auto") == "dummy":
        attention, experts = shape.weights(ITEMSIZES[dtype])
    else:
        attention, experts = _count_tensors(model_path, shape, ITEMSIZES[dtype])
    kv_itemsize = 1 if "fp8" in flags.text("--kv-cache-dtype") else ITEMSIZES[dtype]
    return ModelSize(
        attention_bytes=attention,
        expert_bytes=experts // shape.num_experts,
        kv_bytes_per_token=2 * shape.num_layers * shape.kv_size * kv_itemsize,
        dtype=dtype,
        is_fp8=shape.fp8_block > 0,
        num_experts=shape.num_experts,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        qkv_size=shape.query_size + 2 * shape.kv_size,
        moe_size=shape.moe_size,
        top_k=shape.top_k,
        vocab_size=shape.vocab_size,
        context_length=flags.number("--context-length", shape.context_length),
    )


class _Shape:
    """The numbers of a config.json."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.architecture = (config.get("architectures") or ["unknown"])[0]
        if "kv_lora_rank" in config or "num_attention_heads" not in config:
            raise ConfigError(f"the cache of {self.architecture} has a form that is not known here")
        self.num_experts = max(
            (config[key] for key in EXPERT_COUNT_KEYS if isinstance(config.get(key), int)),
            default=0,
        )
        if self.num_experts < 1:
            raise ConfigError(f"{self.architecture} has no experts")
        self.num_layers = self._int("num_hidden_layers")
        self.hidden_size = self._int("hidden_size")
        self.vocab_size = self._int("vocab_size")
        self.top_k = self._int("num_experts_per_tok")
        self.moe_size = int(config.get("moe_intermediate_size") or self._int("intermediate_size"))
        heads = self._int("num_attention_heads")
        head_size = int(config.get("head_dim") or self.hidden_size // heads)
        self.query_size = heads * head_size
        self.kv_size = int(config.get("num_key_value_heads") or heads) * head_size
        self._head_size = head_size
        self.context_length = self._context_length()
        self.fp8_block = self._fp8_block()
        self.is_tied = bool(config.get("tie_word_embeddings"))  # one table in, and out

    def weights(self, itemsize: int) -> tuple[int, int]:
        """Bytes of attention and of experts as SGLang allocates them.

        Raises:
            ConfigError: An architecture whose layers are not known here.
        """
        if self.architecture not in DUMMY_ARCHITECTURES:
            raise ConfigError(f"the layers of {self.architecture} are not known here")
        # NOTE: SGLang gives every layer experts, whatever mlp_only_layers says.
        attention = self.num_layers * self._layer_bytes(itemsize)
        num_tables = 1 if self.is_tied else 2
        attention += (num_tables * self.vocab_size + 1) * self.hidden_size * itemsize
        return attention, self.num_layers * self.num_experts * self._mlp(self.moe_size, itemsize)

    def _layer_bytes(self, itemsize: int) -> int:
        hidden, qkv_size = self.hidden_size, self.query_size + 2 * self.kv_size
        is_qwen2 = self.architecture == "Qwen2MoeForCausalLM"
        total = self._linear(hidden, qkv_size, itemsize)
        total += self._linear(self.query_size, hidden, itemsize)
        small = 2 * hidden  # norms
        if self._config.get("qkv_bias" if is_qwen2 else "attention_bias", is_qwen2):
            small += qkv_size if is_qwen2 else qkv_size + hidden
        if not is_qwen2:
            small += 2 * self._head_size  # norms of queries and keys
        small += hidden * self.num_experts  # the gate
        shared_size = int(self._config.get("shared_expert_intermediate_size") or 0)
        if is_qwen2 and shared_size:
            small += hidden  # the shared expert's gate
            total += self._mlp(shared_size, itemsize)
        return total + small * itemsize

    def _mlp(self, size: int, itemsize: int) -> int:
        gate_and_up = self._linear(self.hidden_size, 2 * size, itemsize)
        return gate_and_up + self._linear(size, self.hidden_size, itemsize)

    def _linear(self, inputs: int, outputs: int, itemsize: int) -> int:
        if not self.fp8_block:
            return inputs * outputs * itemsize
        blocks = math.ceil(inputs / self.fp8_block) * math.ceil(outputs / self.fp8_block)
        return inputs * outputs + 4 * blocks

    def _fp8_block(self) -> int:
        quantization = self._config.get("quantization_config")
        if not quantization:
            return 0
        block = quantization.get("weight_block_size")
        if quantization.get("quant_method") != "fp8" or not block or block[0] != block[1]:
            raise ConfigError(f"{self.architecture} is quantised in a way that is not known here")
        return int(block[0])

    def _context_length(self) -> int:
        scaling = self._config.get("rope_scaling") or {}
        is_plain = "original_max_position_embeddings" in scaling
        is_plain = is_plain or scaling.get("rope_type") == "llama3"
        factor = 1 if is_plain else scaling.get("factor", 1)
        for key in CONTEXT_KEYS:
            if self._config.get(key) is not None:
                return int(factor * self._config[key])
        return 2048

    def _int(self, key: str) -> int:
        value = self._config.get(key)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json of {self.architecture} says {key} = {value!r}")
        return value


def _text_config(model_path: Path, flags: Flags) -> dict[str, Any]:
    config = read_config(str(model_path))
    try:
        config |= json.loads(flags.text("--json-model-override-args", default="{}"))
    except (ValueError, TypeError):
        raise ConfigError("--json-model-override-args is not a JSON object") from None
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _dtype(config: Mapping[str, Any], flag: str) -> str:
    """What SGLang makes of `--dtype`; it serves a float32 model as float16 unless told."""
    wanted = DTYPES.get(flag, flag)
    if wanted == "auto":
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        wanted = "float16" if stored == "float32" else stored
    if wanted not in ITEMSIZES:
        raise ConfigError(f"dtype {wanted} is none of {', '.join(ITEMSIZES)}")
    return wanted


def _count_tensors(model_path: Path, shape: _Shape, itemsize: int) -> tuple[int, int]:
    attention = experts = 0
    for name, tensor in _tensors(model_path):
        layer = _LAYER.search(name)
        if layer and int(layer[1]) >= shape.num_layers:
            continue  # of a model that is served with fewer layers
        if shape.is_tied and name == "lm_head.weight":
            continue
        size = math.prod(tensor["shape"]) * _loaded_itemsize(name, tensor["dtype"], itemsize)
        if _EXPERT.search(name):
            experts += size
        else:
            attention += size
    return attention, experts


def _loaded_itemsize(name: str, dtype: str, itemsize: int) -> int:
    if dtype in FLOATS and not _SCALE.search(name):
        return itemsize  # SGLang converts these to the model's dtype
    return HEADER_ITEMSIZES.get(dtype, 1)


def _tensors(model_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in safetensors_files(str(model_path)):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            header.pop("__metadata__", None)
            yield from header.items()
        except (OSError, ValueError, AttributeError, MemoryError, OverflowError):
            raise ConfigError(
                f"{path} has no safetensors header; copy or download it again"
            ) from None
