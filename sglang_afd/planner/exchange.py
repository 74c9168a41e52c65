"""Time of moving rows to the experts and back."""

from __future__ import annotations

from sglang_afd.planner.constants import Constants
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.shape import ModelShape

# Source: DeepEP README, normal kernels reach 153 to 158 of 160 GB/s; taken lower for short rows.
LINK_EFFICIENCY = 0.8


def colocated_us(
    shape: ModelShape, gpu: Gpu, constants: Constants, *, tokens: float, num_ranks: int
) -> float:
    """Dispatch and combine of one rank's tokens: a row per chosen expert, both ways, not hidden."""
    if num_ranks == 1:
        return 0.0
    row_bytes = shape.hidden_size * (shape.dispatch_element_bytes + shape.combine_element_bytes)
    remote = 1 - 1 / num_ranks
    bandwidth = gpu.bytes_per_us_among(num_ranks) * constants.colocated_exchange_efficiency
    moved_bytes = tokens * shape.experts_per_token * row_bytes * remote
    return constants.colocated_exchange_fixed_us * gpu.operator_scale + moved_bytes / bandwidth


def attention_side_us(
    shape: ModelShape,
    gpu: Gpu,
    constants: Constants,
    *,
    tokens: float,
    total_gpus: int,
    fused: bool,
) -> float:
    """Latency of one way for one attention GPU: the mean of dispatch and combine."""
    topk, link = shape.experts_per_token, gpu.bytes_per_us_among(total_gpus)
    if not fused:
        row_bytes = shape.hidden_size * (shape.dispatch_element_bytes + shape.combine_element_bytes)
        bandwidth = link * constants.colocated_exchange_efficiency
        fixed_us = constants.colocated_exchange_fixed_us * gpu.operator_scale
        return (fixed_us + tokens * topk * row_bytes / bandwidth) / 2
    per_token = shape.hidden_size * (
        shape.dispatch_element_bytes + topk * shape.combine_element_bytes
    )
    fixed_us = constants.afd_exchange_fixed_us * gpu.operator_scale
    return fixed_us + tokens * per_token / 2 / (link * LINK_EFFICIENCY)


def fan_in_us(
    shape: ModelShape, gpu: Gpu, *, tokens: float, num_ranks: int, total_gpus: int
) -> float:
    """Time that an MLP GPU's link is busy for all its peers; a stage cannot be shorter than that.

    A link carries both ways at once, so the wider way counts: the results.
    """
    rows = tokens * shape.experts_per_token / num_ranks
    widest = max(shape.dispatch_element_bytes, shape.combine_element_bytes)
    bandwidth = gpu.bytes_per_us_among(total_gpus) * LINK_EFFICIENCY
    return rows * shape.hidden_size * widest / bandwidth
