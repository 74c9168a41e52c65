"""Calls the experts of all layers by themselves: so many tokens, so many experts hit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglang_afd.planner.fit import ROW_NOISE
from sglang_afd.planner.samples import ExpertSample
from sglang_afd.planner.shape import ModelShape
from sglang_afd.upstream.one_batch import Layer, chosen

_REPEATS = 5


def offers(shape: ModelShape) -> list[int]:
    """Numbers of experts that tokens choose among: no more than they need, up to all."""
    top_k, everything = shape.experts_per_token, shape.num_experts
    return sorted({top_k, max(top_k, everything // 4), everything})


@torch.no_grad()
def sample(
    layers: Sequence[Layer], shape: ModelShape, tokens: Sequence[int], device: str
) -> list[ExpertSample]:
    """A time of each number of tokens and offered experts."""
    return [
        _one(layers, shape, rows, offered, device) for rows in tokens for offered in offers(shape)
    ]


def _one(
    layers: Sequence[Layer], shape: ModelShape, rows: int, offered: int, device: str
) -> ExpertSample:
    generator = torch.Generator().manual_seed(rows * 1000 + offered)
    picks = [_draw(shape, rows, offered, generator) for _ in layers]
    weights = torch.full(picks[0].shape, 1 / shape.experts_per_token, dtype=torch.float32)
    routed = [chosen(ids.to(device), weights.to(device)) for ids in picks]
    source = torch.randn((rows, shape.hidden_size), generator=generator)
    source = source.to(device=device, dtype=_activation_dtype(layers[0]))
    inputs = [source.clone() for _ in layers]

    def call() -> None:
        for layer, given, routing in zip(layers, inputs, routed, strict=True):
            layer.experts(given, routing)

    def restore() -> None:  # experts may write over their input
        for given in inputs:
            given.copy_(source)

    timed = _timed_on_cpu if device == "cpu" else _timed_on_gpu
    times_us = [us / len(layers) for us in timed(call, restore)]
    middle = statistics.median(times_us)
    first, _, third = statistics.quantiles(times_us, n=4, method="inclusive")
    return ExpertSample(
        tokens=rows,
        experts_offered=offered,
        experts_hit=statistics.mean(float(len(ids.unique())) for ids in picks),
        time_us=middle,
        noise=ROW_NOISE + (third - first) / 2 / middle,
    )


def _draw(shape: ModelShape, rows: int, offered: int, generator: torch.Generator) -> Tensor:
    """Different experts for each token, of every n-th expert."""
    order = torch.rand((rows, offered), generator=generator).argsort(dim=1)
    stride = shape.num_experts // offered
    return (order[:, : shape.experts_per_token] * stride).to(torch.int32).contiguous()


def _activation_dtype(layer: Layer) -> torch.dtype:
    kinds = [p.dtype for p in layer.whole.parameters() if p.dim() == 1 and p.is_floating_point()]
    return kinds[0] if kinds else torch.bfloat16  # norms are never quantized


def _timed_on_cpu(call: Callable[[], None], restore: Callable[[], None]) -> list[float]:
    call()
    times_us = []
    for _ in range(_REPEATS):
        restore()
        started_s = time.perf_counter()
        call()
        times_us.append((time.perf_counter() - started_s) * 1e6)
    return times_us


def _timed_on_gpu(call: Callable[[], None], restore: Callable[[], None]) -> list[float]:
    """As one CUDA graph of all layers: launches would take longer than small kernels do."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles and loads
        restore()
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times_us = []
    for number in range(_REPEATS + 1):
        restore()
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        if number:  # the first replay warms up
            elapsed_ms = float(began.elapsed_time(ended))
            times_us.append(elapsed_ms * 1000)
    return times_us
