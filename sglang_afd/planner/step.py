"""step_of: the time of a step and of its stages, from physics and constants alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_afd.planner import attention, exchange
from sglang_afd.planner.barrier import expected_max_normal
from sglang_afd.planner.constants import Constants
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode
from sglang_afd.planner.experts import ExpertKernel, ExpertTime, expert_time
from sglang_afd.planner.pipeline import Pipeline
from sglang_afd.planner.scenario import Scenario

SERIAL = "serial"  # a colocated step has no stages that could wait for each other

# Core-only: packing and sending queries, keys and values, or the outputs.
# Source: FastAFD fork, kernel table: outputs 8.1 us; QKV 8.6 us at 1:1 and 20.9 us at 15:1.
CORE_PUBLISH_US = 8.1
CORE_PUBLISH_PER_PEER_US = (20.9 - 8.6) / 14


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Of one layer and micro-batch."""

    core_us: float
    dense_us: float
    experts: ExpertTime
    exchange_us: float  # AFD: one way; colocated: dispatch and combine
    attn_us: float  # the attention stage
    mlp_us: float  # the MLP stage; colocated: experts and exchange
    wait_us: float = 0.0  # for the slowest of the GPUs whose rows meet, by their jitter alone


@dataclass(frozen=True, kw_only=True)
class Step:
    """Of one deployment."""

    stages: StageTimes
    layers_us: float  # of all layers with experts
    outside_layers_us: float  # head, sampling, start of the step, plain layers
    binding: str  # pipeline.ATTENTION, MLP or ROUND_TRIP, or SERIAL

    @property
    def step_us(self) -> float:
        """Of the whole step."""
        return self.layers_us + self.outside_layers_us


def step_of(scenario: Scenario, deployment: Deployment) -> Step:
    """Of a deployment whose experts and jitter have been checked."""
    if deployment.mode is Mode.COLOCATED:
        stages, layers_us, binding = _colocated(scenario, deployment)
    else:
        stages, layers_us, binding = _disaggregated(scenario, deployment)
    return Step(
        stages=stages,
        layers_us=layers_us,
        outside_layers_us=_outside_layers_us(scenario, deployment, stages),
        binding=binding,
    )


def reads(deployment: Deployment, name: str) -> bool:
    """Whether a step of this deployment can depend on the constant of this name."""
    if deployment.mode is Mode.COLOCATED:
        return not name.startswith("afd_")
    has_grouped_kernels = deployment.expert_kernels is ExpertKernels.GROUPED
    return has_grouped_kernels or not name.startswith("colocated_")


def _wait_us(scenario: Scenario, deployment: Deployment, core_us: float, dense_us: float) -> float:
    """What the slowest peer takes longer by jitter, beside what unequal contexts cost already.

    Source: the Gaussian barrier of arXiv 2601.21351. Both causes are independent, so their
    deviations add up as squares.
    """
    if not scenario.jitter:
        return 0.0
    even = replace(scenario, workload=replace(scenario.workload, context_std_tokens=0.0))
    mean_us = _core_us(even, deployment)
    by_contexts = core_us - mean_us
    peers = max(int(deployment.peers_per_expert_copy), 1)
    by_jitter = scenario.jitter * (mean_us + dense_us) * expected_max_normal(peers)
    return math.hypot(by_contexts, by_jitter) - by_contexts


def _core_us(scenario: Scenario, deployment: Deployment) -> float:
    requests = deployment.requests_per_micro_batch
    context = attention.slowest_context_tokens(
        scenario.workload, requests, deployment.peers_per_expert_copy
    )
    return attention.core_us(
        scenario.shape,
        scenario.gpu,
        scenario.constants,
        requests=requests,
        context_tokens=context,
        verify_tokens=scenario.workload.verify_tokens,
    )


def _dense_us(scenario: Scenario, tokens: float, fixed_us: float) -> float:
    return attention.dense_us(
        scenario.shape, scenario.gpu, scenario.constants, tokens=tokens, fixed_us=fixed_us
    )


def _colocated(scenario: Scenario, deployment: Deployment) -> tuple[StageTimes, float, str]:
    """Everything in a row; a system may cut a large batch for its experts, not for attention."""
    constants, ranks = scenario.constants, deployment.expert_parallel
    tokens = deployment.batch_per_attn_gpu * scenario.workload.verify_tokens
    kernel = _grouped_kernel(constants)
    most = scenario.colocated_piece_tokens or tokens
    whole, rest = divmod(tokens, most)
    pieces = []
    exchange_us = 0.0
    for times, piece in ((whole, most), (1, rest)):
        if not times or not piece:
            continue
        pieces.append((times, _experts(scenario, kernel, piece * ranks, ranks)))
        exchange_us += times * exchange.colocated_us(
            scenario.shape, scenario.gpu, constants, tokens=piece, num_ranks=ranks
        )
    experts = ExpertTime(
        fixed_us=sum(times * piece.fixed_us for times, piece in pieces),
        weights_us=sum(times * piece.weights_us for times, piece in pieces),
        compute_us=sum(times * piece.compute_us for times, piece in pieces),
    )
    core_us = _core_us(scenario, deployment)
    dense_us = _dense_us(scenario, tokens, constants.colocated_dense_fixed_us)
    mlp_us = experts.total_us + exchange_us
    stages = StageTimes(
        core_us=core_us,
        dense_us=dense_us,
        experts=experts,
        exchange_us=exchange_us,
        attn_us=core_us + dense_us,
        mlp_us=mlp_us,
        wait_us=_wait_us(scenario, deployment, core_us, dense_us),
    )
    layers_us = scenario.shape.num_moe_layers * (stages.attn_us + stages.wait_us + mlp_us)
    start_us = constants.colocated_rank_step_us * scenario.gpu.operator_scale * ranks
    return stages, layers_us + start_us, SERIAL


def _grouped_kernel(constants: Constants) -> ExpertKernel:
    return ExpertKernel(
        fixed_us=constants.colocated_expert_fixed_us,
        weight_read_efficiency=constants.weight_read_efficiency,
        flops_efficiency=constants.colocated_expert_flops_efficiency,
        tile_rows=None,
    )


def _fused_kernel(constants: Constants) -> ExpertKernel:
    return ExpertKernel(
        fixed_us=constants.afd_expert_fixed_us,
        weight_read_efficiency=constants.weight_read_efficiency,
        flops_efficiency=constants.afd_expert_flops_efficiency,
        tile_rows=constants.afd_tile_rows,
    )


def _experts(scenario: Scenario, kernel: ExpertKernel, tokens: float, num_ranks: int) -> ExpertTime:
    return expert_time(
        scenario.shape,
        scenario.gpu,
        kernel,
        scenario.effective_routing(),
        tokens=tokens,
        num_ranks=num_ranks,
    )


def _disaggregated(scenario: Scenario, deployment: Deployment) -> tuple[StageTimes, float, str]:
    """Two stages and the exchange between them."""
    constants, ranks = scenario.constants, deployment.expert_parallel
    tokens = deployment.rows_per_micro_batch * scenario.workload.verify_tokens
    meeting = tokens * deployment.peers_per_expert_copy
    grouped = deployment.expert_kernels is ExpertKernels.GROUPED
    kernel = _grouped_kernel(constants) if grouped else _fused_kernel(constants)
    experts = _experts(scenario, kernel, meeting, ranks)
    fan_in = exchange.fan_in_us(
        scenario.shape,
        scenario.gpu,
        tokens=meeting,
        num_ranks=ranks,
        total_gpus=deployment.total_gpus,
    )
    one_way = exchange.attention_side_us(
        scenario.shape,
        scenario.gpu,
        constants,
        tokens=tokens,
        total_gpus=deployment.total_gpus,
        fused=not grouped,
    )
    core_us = _core_us(scenario, deployment)
    mlp_us = max(experts.total_us, fan_in)
    if deployment.mode is Mode.CORE_ONLY:
        peers = deployment.attn_gpus / deployment.mlp_gpus
        dense_us = _dense_us(scenario, tokens * peers, constants.afd_dense_fixed_us)
        publish_us = CORE_PUBLISH_US + CORE_PUBLISH_PER_PEER_US * max(peers - 1, 0)
        attn_us, mlp_us = core_us + CORE_PUBLISH_US, mlp_us + dense_us + publish_us
        wait_us = _wait_us(scenario, deployment, core_us, CORE_PUBLISH_US)
    else:
        dense_us = _dense_us(scenario, tokens, constants.afd_dense_fixed_us)
        attn_us = core_us + dense_us
        wait_us = _wait_us(scenario, deployment, core_us, dense_us)
    pipeline = Pipeline(
        attn_us=attn_us,
        mlp_us=mlp_us,
        exchange_us=one_way,
        num_layers=scenario.shape.num_moe_layers,
        num_micro_batches=deployment.micro_batches,
        wait_us=wait_us,
    )
    stages = StageTimes(
        core_us=core_us,
        dense_us=dense_us,
        experts=experts,
        exchange_us=one_way,
        attn_us=attn_us,
        mlp_us=mlp_us,
        wait_us=wait_us,
    )
    return stages, pipeline.layers_us, pipeline.binding


def _outside_layers_us(scenario: Scenario, deployment: Deployment, stages: StageTimes) -> float:
    shape, constants = scenario.shape, scenario.constants
    verify_tokens = scenario.workload.verify_tokens
    plain_layers = shape.num_layers - shape.num_moe_layers
    plain_mlp_us = attention.product_us(
        scenario.gpu,
        constants,
        weights=shape.plain_mlp_weights,
        weight_bytes=shape.weight_bytes,
        tokens=deployment.rows_per_micro_batch * verify_tokens,
    )
    head_us = attention.product_us(
        scenario.gpu,
        constants,
        weights=shape.head_weights,
        weight_bytes=2.0,
        tokens=deployment.batch_per_attn_gpu * verify_tokens,
    )
    plain_us = stages.core_us + stages.dense_us + plain_mlp_us
    colocated = deployment.mode is Mode.COLOCATED
    fixed_us = constants.colocated_step_fixed_us if colocated else constants.afd_step_fixed_us
    fixed_us *= scenario.gpu.operator_scale
    return fixed_us + head_us + plain_layers * deployment.micro_batches * plain_us
