"""Which experts a step chooses, layer by layer, seen by hooks on the top-k modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Routing:
    """A context manager; steps inside must run without graphs, or nothing is seen."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._chosen: list[list[Tensor]] = []

    def __enter__(self) -> Routing:
        from sglang.srt.layers.moe.topk import TopK

        modules = [module for module in self._model.modules() if isinstance(module, TopK)]
        self._chosen = [[] for _ in modules]
        self._handles = [
            module.register_forward_hook(self._note(chosen))
            for module, chosen in zip(modules, self._chosen, strict=True)
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def touched(self) -> list[list[int]]:
        """Of each MoE layer, in order of layers."""
        return [
            sorted({expert for ids in chosen for expert in ids.unique().tolist() if expert >= 0})
            for chosen in self._chosen
        ]

    @staticmethod
    def _note(chosen: list[Tensor]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            chosen.append(output.topk_ids.clone())  # read afterwards: a step must not wait

        return hook
