"""predict: the step time of a deployment, from physics and constants alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_afd.errors import ConfigError
from sglang_afd.planner import attention, checks, exchange
from sglang_afd.planner.barrier import expected_max_normal
from sglang_afd.planner.constants import DEFAULTS, Constants
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode, Workload
from sglang_afd.planner.experts import ExpertKernel, ExpertTime, expert_time
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.memory import USABLE_FRACTION, MemoryPlan, plan_memory
from sglang_afd.planner.pipeline import Pipeline
from sglang_afd.planner.routing import Routing, skewed_routing
from sglang_afd.planner.shape import ModelShape

SERIAL = "serial"  # a colocated step has no stages that could wait for each other

# Core-only: packing and sending queries, keys and values, or the outputs.
# Source: FastAFD fork, kernel table: outputs 8.1 us; QKV 8.6 us at 1:1 and 20.9 us at 15:1.
CORE_PUBLISH_US = 8.1
CORE_PUBLISH_PER_PEER_US = (20.9 - 8.6) / 14

# Up to here the closed form was compared with simulations (benchmark/bench_simulator.py). With 3 or
# 4 micro-batches those under way hide a late one, which the form leaves out.
MOST_JITTER = 0.2
MOST_JITTER_OF_MANY = 0.05


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything about a prediction but the deployment."""

    shape: ModelShape
    gpu: Gpu
    workload: Workload
    constants: Constants = DEFAULTS
    routing: Routing | None = None  # None: from constants.routing_skew
    usable_memory_fraction: float = USABLE_FRACTION
    # Tokens of a rank that a colocated system runs through its experts at once. None: any number,
    # as SGLang does; its dispatch buffers bound the batch of a GPU, they do not cut it.
    colocated_piece_tokens: int | None = None
    # Standard deviation of a GPU's time for the attention of a layer, over its mean, from layer to
    # layer and from GPU to GPU. The others wait for the slowest one, colocated ones as well.
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.routing and len(self.routing.probabilities) != self.shape.num_experts:
            raise ConfigError(
                f"routing: {len(self.routing.probabilities)} experts, model {self.shape.name} has "
                f"{self.shape.num_experts}"
            )
        if not 0 < self.usable_memory_fraction <= 1:
            raise ConfigError(
                f"usable_memory_fraction is {self.usable_memory_fraction}; wanted above 0 and "
                "at most 1"
            )
        if self.colocated_piece_tokens is not None:
            checks.whole("scenario", "colocated_piece_tokens", self.colocated_piece_tokens)
        checks.not_negative("scenario", "jitter", self.jitter)
        if self.jitter > MOST_JITTER:
            raise ConfigError(
                f"scenario: jitter is {self.jitter:g}; wanted at most {MOST_JITTER:g}, as 5 % is "
                "0.05. Beyond it the closed form is not checked: `simulate --attn-jitter` plays it"
            )

    def knows_jitter_of(self, micro_batches: int) -> bool:
        """Whether this many micro-batches were checked under so much jitter."""
        return micro_batches <= 2 or self.jitter <= MOST_JITTER_OF_MANY

    def with_constants(self, constants: Constants) -> Scenario:
        """The same scenario with other constants."""
        return replace(self, constants=constants)

    def effective_routing(self) -> Routing:
        """As measured, or of the fitted skew."""
        if self.routing:
            return self.routing
        shape = self.shape
        return skewed_routing(
            shape.num_experts, shape.experts_per_token, self.constants.routing_skew
        )


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
class Prediction:
    """Of one deployment."""

    deployment: Deployment
    step_us: float
    tokens_per_s_per_gpu: float  # over all GPUs of both roles
    tpot_us: float
    binding: str  # pipeline.ATTENTION, MLP or ROUND_TRIP, or SERIAL
    stages: StageTimes
    outside_layers_us: float  # head, sampling, start of the step, plain layers
    memory: MemoryPlan


def predict(scenario: Scenario, deployment: Deployment) -> Prediction:
    """Step time, throughput and memory; memory is reported, `memory.require_fit` refuses.

    Raises: ConfigError, when the experts do not divide among their GPUs, or the jitter is more than
        is known of so many micro-batches.
    """
    check_experts(scenario.shape, deployment)
    check_jitter(scenario, deployment)
    if deployment.mode is Mode.COLOCATED:
        stages, layers_us, binding = _colocated(scenario, deployment)
    else:
        stages, layers_us, binding = _disaggregated(scenario, deployment)
    outside_us = _outside_layers_us(scenario, deployment, stages)
    step_us = layers_us + outside_us
    workload = scenario.workload
    tokens = deployment.attn_gpus * deployment.batch_per_attn_gpu * workload.accepted_tokens
    return Prediction(
        deployment=deployment,
        step_us=step_us,
        tokens_per_s_per_gpu=tokens * 1e6 / (step_us * deployment.total_gpus),
        tpot_us=step_us / workload.accepted_tokens,
        binding=binding,
        stages=stages,
        outside_layers_us=outside_us,
        memory=plan_memory(
            scenario.shape, scenario.gpu, workload, deployment, scenario.usable_memory_fraction
        ),
    )


def check_experts(shape: ModelShape, deployment: Deployment) -> None:
    """Raises: ConfigError, when the experts do not divide among their GPUs."""
    if shape.num_experts % deployment.expert_parallel:
        raise ConfigError(
            f"deployment {deployment.label}: {shape.num_experts} experts of {shape.name} do not "
            f"divide among {deployment.expert_parallel} GPUs; use a divisor of {shape.num_experts}"
        )


def check_jitter(scenario: Scenario, deployment: Deployment) -> None:
    """Raises: ConfigError, when the closed form is not known to hold."""
    if not scenario.knows_jitter_of(deployment.micro_batches):
        raise ConfigError(
            f"deployment {deployment.label}: the closed form knows a jitter of "
            f"{scenario.jitter:g} for 1 and 2 micro-batches only, and one of up to "
            f"{MOST_JITTER_OF_MANY:g} for more; `simulate --attn-jitter` plays any"
        )


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
    reading = scenario.gpu.hbm_bytes_per_us * constants.weight_read_efficiency
    plain_layers = shape.num_layers - shape.num_moe_layers
    plain_us = stages.core_us + stages.dense_us + shape.plain_mlp_bytes / reading
    colocated = deployment.mode is Mode.COLOCATED
    fixed_us = constants.colocated_step_fixed_us if colocated else constants.afd_step_fixed_us
    fixed_us *= scenario.gpu.operator_scale
    return (
        fixed_us + shape.head_bytes / reading + plain_layers * deployment.micro_batches * plain_us
    )
