"""Time of the attention side of one layer: core attention and the dense rest."""

from __future__ import annotations

import math

from sglang_afd.planner.barrier import expected_max_normal
from sglang_afd.planner.constants import Constants
from sglang_afd.planner.deployment import Workload
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.shape import ModelShape

# Source: FlashMLA README, 660 of 989 TFLOP/s in decode. It binds for latent attention only: grouped
# attention is bound by reading the cache.
CORE_FLOPS_EFFICIENCY = 0.65
# Source: DeepGEMM README, dense products reach 1550 of 1979 TFLOP/s on H800.
PRODUCT_FLOPS_EFFICIENCY = 0.78


def slowest_context_tokens(workload: Workload, requests: float, num_peers: float) -> float:
    """Mean context of a request on the peer that holds most; the others wait for that peer."""
    peers = max(int(num_peers), 1)
    if workload.context_std_tokens <= 0 or peers == 1:
        return workload.context_tokens
    spread = workload.context_std_tokens / math.sqrt(requests)
    return workload.context_tokens + spread * expected_max_normal(peers)


def core_us(
    shape: ModelShape,
    gpu: Gpu,
    constants: Constants,
    *,
    requests: float,
    context_tokens: float,
    verify_tokens: int,
) -> float:
    """Reads the cache once, however many tokens are verified, or is bound by the arithmetic."""
    cached_tokens = requests * context_tokens
    read_us = (
        (cached_tokens + requests * constants.core_request_tokens)
        * shape.kv_bytes_per_token_layer
        / (gpu.hbm_bytes_per_us * gpu.cache_read_share * constants.kv_read_efficiency)
    )
    flops = cached_tokens * verify_tokens * shape.core_flops_per_cached_token
    compute_us = flops / (gpu.bf16_flops_per_us * CORE_FLOPS_EFFICIENCY)
    share_of_layers = shape.num_kv_layers / shape.num_layers
    fixed_us = constants.core_fixed_us * gpu.operator_scale + requests * gpu.core_request_us
    return fixed_us + share_of_layers * max(read_us, compute_us)


def dense_us(
    shape: ModelShape, gpu: Gpu, constants: Constants, *, tokens: float, fixed_us: float
) -> float:
    """Norms, projections, router, shared experts: a fixed part, the weights, the arithmetic."""
    return (
        fixed_us * gpu.operator_scale
        + shape.dense_bytes / (gpu.hbm_bytes_per_us * constants.weight_read_efficiency)
        + tokens
        * shape.dense_flops_per_token
        / (gpu.flops_per_us(shape.weight_bytes) * constants.dense_flops_efficiency)
    )


def product_us(
    gpu: Gpu, constants: Constants, *, weights: float, weight_bytes: float, tokens: float
) -> float:
    """One large product: its arithmetic hides behind reading the weights, or the other way."""
    read_us = weights * weight_bytes / (gpu.hbm_bytes_per_us * constants.weight_read_efficiency)
    flops_per_us = gpu.flops_per_us(weight_bytes) * PRODUCT_FLOPS_EFFICIENCY
    return max(read_us, 2.0 * weights * tokens / flops_per_us)
