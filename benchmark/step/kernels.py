"""Where the device's time goes: kernels by groups, and the gaps between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
    ("routing", r"topk_?gating|topk_softmax|topk_sigmoid|grouped_topk|moe_fused_gate"),
    (
        "moe",
        r"moe|m_?grouped|GemmType\)[1-9]|act_and_mul|silu|swiglu|ep_scatter|ep_gather|post_reorder|tma_align",
    ),
    ("attention", r"flash(?!infer)|fmha|attention|attn|_fwd_|BatchDecode|BatchPrefill|splitkv"),
)
GROUPS = (*(name for name, _ in _GROUPS), "rest")
_MOVES = ("dispatch", "pull", "push", "sum", "exchange_other")


def group_of(name: str) -> str:
    """The group that a kernel belongs to."""
    for group, pattern in _GROUPS:
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return "rest"


def times_of(kernels: Sequence[Kernel], steps: int) -> dict[str, float]:
    """Milliseconds of each group in a step.

    `span` is from the first kernel to the end of the last; of it, `gaps` is without any kernel,
    and `overlap` is what the groups have together beyond the time in which any kernel ran.
    """
    totals = dict.fromkeys(GROUPS, 0.0)
    for name, _, duration in kernels:
        totals[group_of(name)] += duration
    busy, span = _union(kernels)
    totals |= {"overlap": sum(totals.values()) - busy, "gaps": span - busy, "span": span}
    return {name: round(ns / steps / 1e6, 4) for name, ns in totals.items()}


def slowest(kernels: Sequence[Kernel], steps: int, number: int = 12) -> list[dict[str, Any]]:
    """The kernels that take longest, with calls and ms in a step."""
    totals: dict[str, tuple[int, int]] = {}
    for name, _, duration in kernels:
        calls, total = totals.get(name, (0, 0))
        totals[name] = calls + 1, total + duration
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])[:number]
    return [
        {"kernel": name[:100], "calls": round(calls / steps, 2), "ms": round(ns / steps / 1e6, 4)}
        for name, (calls, ns) in ordered
    ]


def units(kernels: Sequence[Kernel]) -> int:
    """Expert runs of a layer that an MLP server launched."""
    return sum(group_of(name) == "plan" for name, _, _ in kernels)


def experts_ms(mlp: Mapping[str, float]) -> float:
    """What an MLP server computes in a step, by `times_of` it: all but exchange and waiting."""
    return round(mlp["moe"] + mlp["routing"] + mlp["attention"] + mlp["rest"], 4)


def difference(
    colocated: Mapping[str, float], attn: Mapping[str, float], mlp: Mapping[str, float]
) -> dict[str, float]:
    """What makes a step of one attention and one MLP server longer: parts of the two spans.

    Args:
        colocated: `times_of` stock SGLang's step.
        attn: Of the attention server.
        mlp: Of the MLP server, which works while the attention server waits.

    Returns: `exchange` is the kernels that move rows. `handover` is what a wait takes beyond the
        work that it waits for: flags, and gaps of the MLP server. `experts`, `attention` and
        `rest` are how much longer the same work takes, for fewer SMs and lost fusion; `launch_gaps`
        how much longer nothing runs. Together they are `total`.
    """
    work = mlp["pull"] + mlp["push"] + experts_ms(mlp)
    parts = {
        "exchange": sum(attn[name] + mlp[name] for name in _MOVES),
        "handover": attn["wait"] - work - mlp["sum"] - mlp["dispatch"] - mlp["exchange_other"],
        "experts": attn["moe"] + mlp["moe"] - colocated["moe"],
        "attention": attn["attention"] + mlp["attention"] - colocated["attention"],
        "rest": attn["rest"]
        + attn["routing"]
        + mlp["rest"]
        + mlp["routing"]
        - colocated["rest"]
        - colocated["routing"],
        "overlap": colocated["overlap"] - attn["overlap"],
        "launch_gaps": attn["gaps"] - colocated["gaps"],
    }
    parts["total"] = attn["span"] - colocated["span"]
    return {name: round(ms, 4) for name, ms in parts.items()}


def _union(kernels: Iterable[Kernel]) -> tuple[int, int]:
    """Time with at least one kernel, and from the first to the end of the last."""
    busy, first, stop = 0, None, 0
    for _, start, duration in sorted(kernels, key=lambda kernel: kernel[1]):
        if first is None:
            first = stop = start
        busy += max(0, start + duration - max(start, stop))
        stop = max(stop, start + duration)
    return busy, 0 if first is None else stop - first


class KernelTimes:
    """A context manager that records what the device runs in this process."""

    def __init__(self) -> None:
        self.events: list[Kernel] = []

    def __enter__(self) -> KernelTimes:
        import torch
        from torch.profiler import ProfilerActivity, profile

        has_gpu = torch.cuda.is_available()
        self._profile = profile(
            activities=[ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU]
        )
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
