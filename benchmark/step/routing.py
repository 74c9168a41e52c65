"""Which experts a step chooses, layer by layer, seen by hooks on the top-k modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Routing:
    """A context manager; steps inside must run without graphs, or nothing is seen."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._experts: list[set[int]] = []

    def __enter__(self) -> Routing:
        from sglang.srt.layers.moe.topk import TopK

        modules = [module for module in self._model.modules() if isinstance(module, TopK)]
        self._experts = [set() for _ in modules]
        self._handles = [
            module.register_forward_hook(self._note(experts))
            for module, experts in zip(modules, self._experts, strict=True)
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def touched(self) -> list[list[int]]:
        """Of each MoE layer, in order of layers."""
        return [sorted(experts) for experts in self._experts]

    @staticmethod
    def _note(experts: set[int]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            experts.update(output.topk_ids.unique().tolist())
            experts.discard(-1)

        return hook
