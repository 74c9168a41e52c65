"""Times of a layer's modules on a CPU, where a module returns when its work is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import nn

from sglang_afd.planner.profiling import kernels
from sglang_afd.planner.profiling.timeline import StepTimes
from sglang_afd.upstream.one_batch import Layer, StockRunner

_WHOLE = "whole"


class _Watch:
    """Adds up the time spent in some modules, by label."""

    def __init__(self) -> None:
        self.totals_s: dict[str, float] = {}
        self._handles: list[Any] = []

    def watch(self, label: str, module: nn.Module) -> None:
        begun: list[float] = []

        def before(*args: Any) -> None:
            begun.append(time.perf_counter())

        def after(*args: Any) -> None:
            spent_s = time.perf_counter() - begun.pop()
            self.totals_s[label] = self.totals_s.get(label, 0.0) + spent_s

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def record(runner: StockRunner, layers: Sequence[Layer], steps: int) -> list[StepTimes]:
    """Stages of each of so many steps."""
    watch = _Watch()
    for layer in layers:
        watch.watch(_WHOLE, layer.whole)
        watch.watch(kernels.CORE, layer.attention)
        watch.watch(kernels.EXPERTS, layer.experts)
    try:
        return [_one_step(runner, watch) for _ in range(steps)]
    finally:
        watch.remove()


def _one_step(runner: StockRunner, watch: _Watch) -> StepTimes:
    watch.totals_s.clear()
    started_s = time.perf_counter()
    runner.step()
    step_s = time.perf_counter() - started_s
    found = watch.totals_s
    core_s, experts_s = found[kernels.CORE], found[kernels.EXPERTS]
    stages_s = dict.fromkeys(kernels.STAGES, 0.0) | {
        kernels.CORE: core_s,
        kernels.EXPERTS: experts_s,
        kernels.DENSE: found[_WHOLE] - core_s - experts_s,
        kernels.OUTSIDE: step_s - found[_WHOLE],
    }
    return StepTimes(
        stages_us={stage: seconds * 1e6 for stage, seconds in stages_s.items()},
        by_kernel_us={},
    )
