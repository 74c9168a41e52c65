"""The part of a model that runs once for each micro-batch: embeddings, layers, last norm."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_context import ForwardContext, get_forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
    build_attention_backends,
)
from torch import nn

from sglang_afd.errors import UpstreamMismatch
from sglang_afd.upstream.moe import FusedMoE

__all__ = [
    "MicroBatchBackends",
    "ModelRunner",
    "context_with",
    "find_inner_model",
    "forward_hook",
    "keep_on_one_stream",
    "may_cut_inside",
]

_INPUTS = ("input_ids", "positions", "forward_batch")


def find_inner_model(model: nn.Module) -> nn.Module:
    """The smallest module that holds every MoE layer and takes token ids.

    Raises:
        UpstreamMismatch: There is none.
    """
    num_layers = _count_moe_layers(model)
    fitting = [
        module
        for module in model.modules()  # outer modules come first
        if set(_INPUTS) <= set(inspect.signature(type(module).forward).parameters)
        and _count_moe_layers(module) == num_layers
    ]
    if not fitting or fitting[-1] is model:
        raise UpstreamMismatch(
            f"{type(model).__name__} has no inner model whose forward takes {', '.join(_INPUTS)}, "
            f"so its steps cannot be cut; start this server with --afd-num-micro-batches 1"
        )
    return fitting[-1]


def forward_hook(inner: nn.Module) -> str:
    """The dotted path of `inner`'s forward, for a hook."""
    return f"{type(inner).__module__}.{type(inner).__qualname__}.forward"


def keep_on_one_stream(model: nn.Module) -> None:
    """Take the second CUDA stream from blocks with experts.

    A block would exchange its rows while that stream is the thread's current one, and the next
    micro-batch would go on there.
    """
    for block in model.modules():
        has_experts = any(isinstance(child, FusedMoE) for child in block.children())
        if has_experts and "alt_stream" in vars(block):
            vars(block)["alt_stream"] = None


def may_cut_inside(runner: ModelRunner) -> bool:
    """May a sequence's rows of one step be in two micro-batches? Not with recurrent states."""
    return not isinstance(runner.req_to_token_pool, HybridReqToTokenPool)


class MicroBatchBackends:
    """An attention backend for each micro-batch, built as the runner's own when first needed."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._backends: list[AttentionBackend] = []

    def first(self, number: int) -> Sequence[AttentionBackend]:
        """Those of the first `number` micro-batches; not before the key-value cache exists."""
        while len(self._backends) < number:
            built = build_attention_backends(model_runner=self._runner)
            self._backends.append(built.attn_backend)
        return self._backends[:number]


def context_with(backend: AttentionBackend) -> ForwardContext:
    """The forward context in force, with another attention backend; inside a forward."""
    return replace(get_forward_context(), attn_backend=backend)


def _count_moe_layers(module: nn.Module) -> int:
    return sum(isinstance(layer, FusedMoE) for layer in module.modules())
