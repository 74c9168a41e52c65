"""What a real model hands to its experts, step by step, and the sums that they must answer.

transformers runs the checkpoint: a prefill and decode steps of several batches, the parts of a
trace. Each part has prompts of its own, so that a reply that reaches the wrong peer is no answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# NOTE: before transformers, which cannot import torchvision on a machine without CUDA otherwise.
import sglang_afd.upstream.cpu_shim  # noqa: F401  # isort: skip
import torch
from torch import Tensor

_PROMPT_TOKENS = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCall:
    """One call of one layer's experts."""

    hidden_states: Tensor  # [T, H] float32
    topk_ids: Tensor  # [T, K] int64
    topk_weights: Tensor  # [T, K] float32
    expected: Tensor  # [T, H] float32, by transformers' own experts

    def rows(self, start: int, stop: int) -> LayerCall:
        """The same call for some of its rows."""
        return LayerCall(
            hidden_states=self.hidden_states[start:stop],
            topk_ids=self.topk_ids[start:stop],
            topk_weights=self.topk_weights[start:stop],
            expected=self.expected[start:stop],
        )


Step = list[LayerCall]  # one for each MoE layer, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one attention server does: a prefill, then decode steps of the same requests."""

    prefill: Step
    decode: list[Step]


def num_requests(part: int) -> int:
    """Rows of a decode step of a part: two to four, so that peers differ and some agree."""
    return 2 + part % 3


def record(model: Path, out: Path, *, num_parts: int, num_decode_steps: int = 6) -> Path:
    """Run the checkpoint and write its trace; returns `out`.

    Args:
        model: A checkpoint whose layers are all sparse.
        out: File to write.
        num_parts: Batches, each with other prompts.
        num_decode_steps: Greedy steps after the prefill of each.
    """
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    calls: list[dict[str, Tensor]] = []
    for layer in network.model.layers:
        layer.mlp.experts.register_forward_hook(
            lambda module, given, answer: calls.append(_as_call(given, answer))
        )
    parts = []
    with torch.inference_mode():
        for part in range(num_parts):
            generator = torch.Generator().manual_seed(part)
            shape = (num_requests(part), _PROMPT_TOKENS)
            ids = torch.randint(network.config.vocab_size, shape, generator=generator)
            steps, cache = [], None
            for _ in range(1 + num_decode_steps):
                answer = network(ids, past_key_values=cache, use_cache=True)
                cache, ids = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
                steps.append(list(calls))
                calls.clear()
            parts.append(steps)
    torch.save(parts, out)
    return out


def load(path: Path, part: int) -> Part:
    """One part of a trace."""
    steps: list[list[dict[str, Tensor]]] = torch.load(path, weights_only=True)[part]
    prefill, *decode = [[LayerCall(**call) for call in step] for step in steps]
    return Part(prefill=prefill, decode=decode)


def _as_call(given: tuple[Any, ...], answer: Tensor) -> dict[str, Tensor]:
    hidden_states, topk_ids, topk_weights = given
    return {
        "hidden_states": hidden_states.clone(),
        "topk_ids": topk_ids.clone(),
        "topk_weights": topk_weights.clone(),
        "expected": answer.clone(),
    }
