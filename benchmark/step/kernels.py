"""Where the device's time goes: kernels by groups, and the gaps between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

Kernel = tuple[str, int, int]  # name, start and duration in ns

# The first that matches counts. Ours are named after the parts of an exchange.
_GROUPS = (
    ("dispatch", r"afd_dispatch"),
    ("wait", r"afd_wait"),
    ("sum", r"afd_sum"),
    ("plan", r"afd_plan"),
    ("pull", r"afd_pull"),
    ("push", r"afd_push"),
    ("exchange_other", r"afd_"),
    (
        "moe",
        r"fused_moe|moe_|grouped|deep_gemm|fp8_gemm|act_and_mul|silu|topk|ep_scatter|ep_gather",
    ),
    ("attention", r"flash|fmha|attention|attn|_fwd_kernel|BatchDecode|BatchPrefill|splitkv"),
)
GROUPS = (*(name for name, _ in _GROUPS), "rest")


def group_of(name: str) -> str:
    """The group that a kernel belongs to."""
    for group, pattern in _GROUPS:
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return "rest"


def times_of(kernels: Sequence[Kernel], steps: int) -> dict[str, float]:
    """Milliseconds of each group in a step, their union `busy`, and the `gaps` between."""
    totals = dict.fromkeys(GROUPS, 0.0)
    for name, _, duration in kernels:
        totals[group_of(name)] += duration
    busy, span = _union(kernels)
    totals |= {"busy": busy, "gaps": span - busy}
    return {name: round(ns / steps / 1e6, 4) for name, ns in totals.items()}


def slowest(kernels: Sequence[Kernel], steps: int, number: int = 12) -> list[dict[str, Any]]:
    """The kernels that take longest, with calls and ms in a step."""
    totals: dict[str, tuple[int, int]] = {}
    for name, _, duration in kernels:
        calls, total = totals.get(name, (0, 0))
        totals[name] = calls + 1, total + duration
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])[:number]
    return [
        {"kernel": name[:100], "calls": calls / steps, "ms": round(total / steps / 1e6, 4)}
        for name, (calls, total) in ordered
    ]


def _union(kernels: Iterable[Kernel]) -> tuple[float, float]:
    busy, stop, first = 0, None, None
    for _, start, duration in sorted(kernels, key=lambda kernel: kernel[1]):
        first = start if first is None else first
        stop = start if stop is None else stop
        end = start + duration
        busy += max(0, end - max(start, stop))
        stop = max(stop, end)
    return busy, (stop - first if stop is not None and first is not None else 0)


class KernelTimes:
    """A context manager that records what the device runs in this process."""

    def __init__(self) -> None:
        self.events: list[Kernel] = []

    def __enter__(self) -> KernelTimes:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        from torch.autograd import DeviceType

        self._profile.__exit__(None, None, None)
        results = self._profile.profiler.kineto_results
        self.events = [
            (event.name(), event.start_ns(), event.duration_ns())
            for event in results.events()
            if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
        ]
