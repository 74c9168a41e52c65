"""What Hugging Face transformers says of tokens that SGLang generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# NOTE: before transformers, which cannot import torchvision on a machine without CUDA otherwise.
import sglang_afd.upstream.cpu_shim  # noqa: F401  # isort: skip
import torch
from compare import PROMPTS, Answer


def score(model: Path, answers: Sequence[Answer]) -> list[Answer]:
    """Greedy tokens and logprobs of transformers, given SGLang's tokens as the prefix of each.

    Args:
        model: Checkpoint directory; run in float32.
        answers: One for each of `PROMPTS`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    scored = []
    with torch.inference_mode():
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            prompt_ids = tokenizer(prompt)["input_ids"]
            ids = torch.tensor([[*prompt_ids, *answer.token_ids]])
            logprobs = network(ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
            best = logprobs.max(-1)
            scored.append(Answer(tuple(best.indices.tolist()), tuple(best.values.tolist())))
    return scored
