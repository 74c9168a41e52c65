"""Time of the routed experts of one layer on the busiest rank."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.routing import Routing
from sglang_afd.planner.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class ExpertTime:
    """The parts add up: the kernels do not hide one behind the other, as the measurements show."""

    fixed_us: float
    weights_us: float
    compute_us: float

    @property
    def total_us(self) -> float:
        """Of all parts."""
        return self.fixed_us + self.weights_us + self.compute_us


@dataclass(frozen=True, kw_only=True)
class ExpertKernel:
    """What one implementation of the experts reaches."""

    fixed_us: float
    weight_read_efficiency: float
    flops_efficiency: float
    # Rows of one tile in a kernel that computes the first tile of an expert while the expert's
    # weights stream in; None for kernels that show no such step.
    tile_rows: float | None


def expert_time(
    shape: ModelShape,
    gpu: Gpu,
    kernel: ExpertKernel,
    routing: Routing,
    *,
    tokens: float,
    num_ranks: int,
) -> ExpertTime:
    """Of all tokens that meet in one copy of the experts, spread over num_ranks GPUs."""
    hottest = routing.hottest_rank(num_ranks)
    hit = routing.most_hit_of_a_rank(tokens, num_ranks)
    if kernel.tile_rows is None:
        rows = tokens * shape.experts_per_token
    else:
        rows = routing.rows_after_the_first_tile(tokens, kernel.tile_rows)
    peak = gpu.flops_per_us(shape.weight_bytes)
    return ExpertTime(
        fixed_us=kernel.fixed_us * gpu.operator_scale,
        weights_us=hit
        * shape.expert_bytes
        / (gpu.hbm_bytes_per_us * kernel.weight_read_efficiency),
        compute_us=rows
        / num_ranks
        * hottest
        * shape.expert_flops_per_token
        / (peak * kernel.flops_efficiency),
    )
