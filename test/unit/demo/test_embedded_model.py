"""The real embedded model, built into the user's cache, against the dense model it came from.

transformers' own GGUF reader makes the dense model, so an error of ours in names, quantisation or
the order of rotary rows shows as a difference in the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# NOTE: before transformers, which cannot import torchvision on a machine without CUDA otherwise.
import sglang_afd.upstream.cpu_shim  # noqa: F401
from sglang_afd.demo import ensure_embedded_model
from sglang_afd.demo.manifest import find_damage
from sglang_afd.demo.progress import silent
from sglang_afd.demo.source import find_source

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # two models in float32, on a machine that may be busy
    # transformers initialises the shared expert of width zero that the layout implies.
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op"),
]

TEXT = (
    "The history of Rome begins in 753 BC. According to legend it was founded on seven hills, "
    "and its influence on law and language is still visible. def main(): print('hello', 42)"
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return ensure_embedded_model(progress=silent)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def load_dense() -> Any:
    """The dense model in float32, as transformers reads it from the GGUF file."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30))
    parsed = load_gguf_checkpoint(str(find_source()), return_tensors=True, model_to_load=names)
    tensors = parsed["tensors"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    dense = LlamaForCausalLM(LlamaConfig(**parsed["config"]))
    dense.load_state_dict(tensors)
    return dense.eval()


@torch.no_grad()
def round_weights(model: Any) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def test_its_files_match_their_checksums(directory: Path) -> None:
    assert find_damage(directory) == []


def test_logits_are_the_dense_models(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(TEXT).input_ids
    dense = load_dense()
    exact = logits_of(dense, ids)
    round_weights(dense)
    rounded = logits_of(dense, ids)

    logits = logits_of(model, ids)

    # The same bf16 weights summed in another order, in float32, over 30 layers: 6e-5 measured.
    assert (logits - rounded).abs().max() < 1e-3
    # Rounding the weights to bf16, beside a standard deviation of the logits of 7: 0.18 measured.
    assert (logits - exact).abs().max() < 0.5


def test_tokens_spread_over_the_experts_of_every_layer(model: Any, tokenizer: Any) -> None:
    chosen: list[Tensor] = []

    def record(gate: Any, inputs: Any, outputs: Any) -> None:
        chosen.append(outputs[2])

    hooks = [layer.mlp.gate.register_forward_hook(record) for layer in model.model.layers]
    logits_of(model, tokenizer(TEXT).input_ids)
    for hook in hooks:
        hook.remove()

    counts = torch.stack([torch.bincount(ids.flatten(), minlength=4) for ids in chosen])
    assert (counts > 0).all(), f"tokens per layer and expert: {counts.tolist()}"
    shares = counts.sum(0) / counts.sum()
    assert (shares > 0.15).all(), f"share of each expert: {shares.tolist()}"


def test_text_survives_the_tokenizer_and_digits_stand_alone(tokenizer: Any) -> None:
    text = "naïve 日本\n\t x1234 <|im_start|>"

    ids = tokenizer(text).input_ids

    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.bos_token_id
    assert [tokenizer.decode([i]) for i in tokenizer("1234").input_ids] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("question", "answer"),
    [("What is the capital of France?", "Paris"), ("What is 2+2?", "4")],
)
def test_it_answers_in_english(model: Any, tokenizer: Any, question: str, answer: str) -> None:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    output = model.generate(
        **prompt, max_new_tokens=30, do_sample=False, temperature=None, top_p=None
    )

    reply = tokenizer.decode(output[0][prompt["input_ids"].shape[1] :])
    assert answer in reply
    assert reply.endswith("<|im_end|>")
