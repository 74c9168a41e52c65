"""What the launcher reads from config.json is what SGLang and the model's own class make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import QWEN2_57B, QWEN3_30B, QWEN3_235B_FP8

from sglang_afd.fleet.flags import Flags
from sglang_afd.fleet.model_size import model_size
from sglang_afd.upstream.environment import ModelConfig

MODELS = {"30b": QWEN3_30B, "235b": QWEN3_235B_FP8, "57b": QWEN2_57B}
# As in config.json of Qwen's long-context variants: SGLang multiplies in one case only.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DUMMY = Flags(argv=("--load-format", "dummy"))


@pytest.mark.parametrize("scaling", [None, YARN, LINEAR])
@pytest.mark.parametrize("name", MODELS)
def test_heads_dtype_and_context_are_those_of_sglangs_model_config(
    name: str, scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    config = MODELS[name] | {"rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))

    size = model_size(tmp_path, DUMMY)

    sglang = ModelConfig(str(tmp_path))
    heads = sglang.get_num_kv_heads(1)
    itemsize = torch.finfo(sglang.dtype).bits // 8
    assert size.kv_bytes_per_token == 2 * size.num_layers * heads * sglang.head_dim * itemsize
    assert size.num_layers == sglang.num_hidden_layers
    assert size.hidden_size == sglang.hidden_size
    assert size.context_length == sglang.context_len
    assert size.vocab_size == sglang.vocab_size
    assert size.dtype == str(sglang.dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", ["30b", "57b"])
def test_weights_are_those_of_the_models_own_class(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))

    size = model_size(tmp_path, DUMMY)

    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    others = sum(p.numel() for n, p in model.named_parameters() if ".experts." not in n)
    assert size.rank_bytes(1) == 2 * experts
    assert size.attention_bytes == 2 * others
