"""Describes a CPU in the planner's terms: what is reached by matrix products, and by this model."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from sglang_afd.planner.constants import DEFAULTS
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.shape import ModelShape

_READ_BYTES = 128 * 2**20  # beyond any cache
_WIDTH, _ROWS = 2048, 128
_LINK_BYTES_PER_US = 1e3  # rows through ZeroMQ on one machine; a guess that no colocated step shows


@dataclass(frozen=True, kw_only=True)
class LayerSample:
    """Measured parts of a layer, in us."""

    batch: int
    context_tokens: float
    core_us: float
    dense_us: float


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Reached by matrix products in the model's type on the threads in use."""

    bytes_per_us: float
    flops_per_us: float


@torch.no_grad()
def measure_peaks(dtype: torch.dtype) -> Peaks:
    """A product with one row reads; one with many rows computes."""
    size = torch.empty((), dtype=dtype).element_size()
    count = max(1, _READ_BYTES // (_WIDTH * _WIDTH * size))
    weights = [torch.full((_WIDTH, _WIDTH), 0.01, dtype=dtype) for _ in range(count)]
    row, rows = torch.ones((1, _WIDTH), dtype=dtype), torch.ones((_ROWS, _WIDTH), dtype=dtype)
    read_us = _median_us(lambda: [functional.linear(row, weight) for weight in weights])
    compute_us = _median_us(lambda: functional.linear(rows, weights[0]))
    return Peaks(
        bytes_per_us=count * _WIDTH * _WIDTH * size / read_us,
        flops_per_us=2.0 * _ROWS * _WIDTH * _WIDTH / compute_us,
    )


def describe(
    name: str, memory_bytes: float, peaks: Peaks, shape: ModelShape, samples: Sequence[LayerSample]
) -> Gpu:
    """Fixed costs and the reach of attention come from the samples, the rest from the peaks."""
    scale = _operator_scale(peaks, shape, samples)
    servers = max(os.cpu_count() or 1, 2)  # that this machine runs at once
    request_us, cached_token_us = _core_costs(samples, DEFAULTS.core_fixed_us * scale)
    # The physics counts a start of each request as so many cached tokens already.
    request_us = max(request_us - DEFAULTS.core_request_tokens * cached_token_us, 0.0)
    reading = peaks.bytes_per_us * DEFAULTS.kv_read_efficiency
    share = shape.kv_bytes_per_token_layer / (cached_token_us * reading)
    return Gpu(
        name=name,
        memory_bytes=memory_bytes,
        hbm_bytes_per_us=peaks.bytes_per_us,
        link_bytes_per_us=_LINK_BYTES_PER_US,
        network_bytes_per_us=_LINK_BYTES_PER_US,
        bf16_flops_per_us=peaks.flops_per_us,
        fp8_flops_per_us=peaks.flops_per_us,
        fp4_flops_per_us=peaks.flops_per_us,
        gpus_per_node=servers,
        link_domain_gpus=servers,
        source="matrix products and this model's layers, measured by `profile`",
        operator_scale=scale,
        cache_read_share=min(max(share, 1e-3), 10.0),
        core_request_us=request_us,
    )


def _operator_scale(peaks: Peaks, shape: ModelShape, samples: Sequence[LayerSample]) -> float:
    """What the dense part of the smallest batch takes beyond reading its weights, over a GPU's."""
    smallest = min(samples, key=lambda sample: sample.batch)
    reading_us = shape.dense_bytes / (peaks.bytes_per_us * DEFAULTS.weight_read_efficiency)
    fixed_us = max(smallest.dense_us - reading_us, 0.2 * smallest.dense_us)
    scale = fixed_us / DEFAULTS.colocated_dense_fixed_us
    return scale if abs(scale - 1) > 1e-6 else 1 + 1e-6  # exactly 1 would mean a GPU


def _core_costs(samples: Sequence[LayerSample], fixed_us: float) -> tuple[float, float]:
    """Of a request and of a cached token; least squares of relative errors, both above 0."""
    requests = np.asarray([sample.batch for sample in samples], dtype=np.float64)
    tokens = requests * [sample.context_tokens for sample in samples]
    rest = np.asarray([max(s.core_us - fixed_us, 0.1 * s.core_us) for s in samples])
    both = np.stack([requests / rest, tokens / rest], axis=1)
    request_us, token_us = np.linalg.lstsq(both, np.ones(len(rest)), rcond=None)[0]
    if token_us <= 0:  # too short contexts to see them
        token_us = 1e-3 * float(np.median(rest / tokens))
    if request_us < 0:
        request_us, token_us = 0.0, float(np.median(rest / tokens))
    return float(request_us), float(token_us)


def _median_us(call: Callable[[], object]) -> float:
    call()
    times_s = []
    for _ in range(3):
        started_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s) * 1e6
