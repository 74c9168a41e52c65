"""predict: step time, throughput and memory of a deployment."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.planner.deployment import Deployment
from sglang_afd.planner.memory import MemoryPlan, plan_memory
from sglang_afd.planner.scenario import Scenario, check_experts, check_jitter
from sglang_afd.planner.step import StageTimes, step_of


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one deployment."""

    deployment: Deployment
    step_us: float
    tokens_per_s_per_gpu: float  # over all GPUs of both roles
    tpot_us: float
    binding: str  # pipeline.ATTENTION, MLP or ROUND_TRIP, or step.SERIAL
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
    step = step_of(scenario, deployment)
    workload = scenario.workload
    tokens = deployment.attn_gpus * deployment.batch_per_attn_gpu * workload.accepted_tokens
    return Prediction(
        deployment=deployment,
        step_us=step.step_us,
        tokens_per_s_per_gpu=tokens * 1e6 / (step.step_us * deployment.total_gpus),
        tpot_us=step.step_us / workload.accepted_tokens,
        binding=step.binding,
        stages=step.stages,
        outside_layers_us=step.outside_layers_us,
        memory=plan_memory(
            scenario.shape, scenario.gpu, workload, deployment, scenario.usable_memory_fraction
        ),
    )
