"""Which experts the router of a layer chooses, seen by hooks on the top-k modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sglang_afd.planner.profiling.cases import Case
from sglang_afd.planner.routing import Routing, routing_from_histogram
from sglang_afd.upstream.one_batch import StockRunner, TopK

Counts = NDArray[np.float64]

# Choices of each expert that a histogram needs on average: its noise is then 13 %.
_CHOICES_PER_EXPERT = 60
_MOST_STEPS = 24


def count(runner: StockRunner, case: Case, *, num_experts: int, top_k: int) -> Counts:
    """Choices of each expert in each layer, over as many steps of a case as a histogram needs."""
    runner.prepare(num_rows=case.batch, context=case.context)
    wanted = _CHOICES_PER_EXPERT * num_experts / (top_k * case.batch)
    steps = min(max(2, math.ceil(wanted)), _MOST_STEPS)
    modules = [module for module in runner.model.modules() if isinstance(module, TopK)]
    chosen: list[list[Tensor]] = [[] for _ in modules]
    handles = [
        module.register_forward_hook(_note(found))
        for module, found in zip(modules, chosen, strict=True)
    ]
    try:
        with runner.eager():
            for _ in range(steps):
                runner.step()
            runner.synchronize()
    finally:
        for handle in handles:
            handle.remove()
    return np.asarray([_histogram(found, num_experts) for found in chosen])


def typical(counts: Counts, top_k: int) -> tuple[float, ...]:
    """Probabilities of the layer whose tokens hit a middling number of distinct experts.

    A mean over the layers would hide the skew: each layer has other favourites. () when there are
    too few choices for a histogram.
    """
    if not counts.size or counts.sum(axis=1).min() < _CHOICES_PER_EXPERT / 2 * counts.shape[1]:
        return ()
    routings = [routing_from_histogram(layer, top_k) for layer in counts]
    return _middle(routings).probabilities


def _middle(routings: Sequence[Routing]) -> Routing:
    tokens = max(len(routings[0].probabilities) / routings[0].experts_per_token, 1.0)
    ordered = sorted(routings, key=lambda routing: routing.distinct_experts(tokens))
    return ordered[len(ordered) // 2]


def _note(found: list[Tensor]) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        found.append(output.topk_ids.clone())  # read afterwards: a step must not wait

    return hook


def _histogram(found: Sequence[Tensor], num_experts: int) -> Counts:
    ids = np.concatenate([ids.cpu().numpy().ravel() for ids in found])
    return np.bincount(ids[ids >= 0], minlength=num_experts)[:num_experts].astype(np.float64)
