"""The tokenizer files of the embedded model, written from the vocabulary in the GGUF file."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import (  # type: ignore[import-untyped]
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
)

from sglang_afd.demo.source import Vocabulary


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Byte-level BPE in which every digit stands alone, as SmolLM2 was trained with."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(vocabulary.tokens)},
            merges=[_pair(merge) for merge in vocabulary.merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(vocabulary.tokens[i], special=True) for i in vocabulary.control_ids]
    )
    return tokenizer


def tokenizer_files(vocabulary: Vocabulary, max_length_tokens: int) -> dict[str, bytes]:
    """Contents of tokenizer.json and tokenizer_config.json."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.tokens[vocabulary.bos_token_id],
        "eos_token": vocabulary.tokens[vocabulary.eos_token_id],
        "unk_token": vocabulary.tokens[vocabulary.unk_token_id],
        "pad_token": vocabulary.tokens[vocabulary.pad_token_id],
        "model_max_length": max_length_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": vocabulary.chat_template,
    }
    return {
        "tokenizer.json": build_tokenizer(vocabulary).to_str().encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right
