"""Site: a scenario whose roles may have GPUs of their own, and what each of them costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_afd.planner import checks
from sglang_afd.planner.constants import Constants
from sglang_afd.planner.deployment import Deployment, Mode
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.memory import MemoryPlan, largest_batch
from sglang_afd.planner.pipeline import Pipeline
from sglang_afd.planner.predict import Prediction, predict
from sglang_afd.planner.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where deployments are searched; with nothing but a scenario, one GPU type at price 1."""

    scenario: Scenario  # its GPU is that of attention, and of colocated deployments
    mlp_gpu: Gpu | None = None  # of the MLP role; None: the same
    # Experts in SRAM accelerators that take no time and are not counted: a bound, not a product.
    has_free_experts: bool = False
    attn_price: float = 1.0  # of an attention GPU, or a colocated one
    mlp_price: float = 1.0

    def __post_init__(self) -> None:
        checks.positive("price", "of an attention GPU", self.attn_price)
        checks.positive("price", "of an MLP GPU", self.mlp_price)

    def with_constants(self, constants: Constants) -> Site:
        """The same site with other constants."""
        return replace(self, scenario=self.scenario.with_constants(constants))

    def predict(self, deployment: Deployment) -> Prediction:
        """Like predict.predict; tokens/s are per GPU that is counted."""
        is_plain = self.mlp_gpu is None and not self.has_free_experts
        if is_plain or deployment.mode is Mode.COLOCATED:
            return predict(self.scenario, deployment)
        if self.has_free_experts:
            return _without_experts(self.scenario, deployment)
        assert self.mlp_gpu is not None, "the other cases returned"
        return _with_two_types(self.scenario, self.mlp_gpu, deployment)

    def room(self, deployment: Deployment) -> int:
        """Requests of an attention GPU that fit; 0 when a role has no room for its weights."""
        scenario = self.scenario
        most = largest_batch(
            scenario.shape,
            scenario.gpu,
            scenario.workload,
            _attention_alone(deployment) if self._roles_differ(deployment) else deployment,
            scenario.usable_memory_fraction,
        )
        if most and self._roles_differ(deployment) and not self.has_free_experts:
            one = self.predict(deployment.with_batch(deployment.micro_batches))
            return most if all(role.weights_fit for role in one.memory.roles) else 0
        return most

    def value(self, prediction: Prediction) -> float:
        """Tokens/s per unit of cost: with prices of 1, per GPU."""
        deployment = prediction.deployment
        if deployment.mode is Mode.COLOCATED:
            return prediction.tokens_per_s_per_gpu / self.attn_price
        mlp_gpus = 0 if self.has_free_experts else deployment.mlp_gpus
        cost = deployment.attn_gpus * self.attn_price + mlp_gpus * self.mlp_price
        counted = deployment.attn_gpus + mlp_gpus
        return prediction.tokens_per_s_per_gpu * counted / cost

    def _roles_differ(self, deployment: Deployment) -> bool:
        differs = self.mlp_gpu is not None or self.has_free_experts
        return differs and deployment.mode is not Mode.COLOCATED


def _attention_alone(deployment: Deployment) -> Deployment:
    """With experts on so many GPUs that their memory cannot matter."""
    wide = 2**20
    return replace(deployment, mlp_gpus=wide, expert_parallel=wide)


def _without_experts(scenario: Scenario, deployment: Deployment) -> Prediction:
    base = predict(scenario, deployment)
    stages = replace(
        base.stages,
        experts=replace(base.stages.experts, fixed_us=0.0, weights_us=0.0, compute_us=0.0),
        mlp_us=0.0,
    )
    memory = MemoryPlan(roles=base.memory.roles[:1])
    return _assembled(scenario, replace(base, stages=stages, memory=memory), deployment.attn_gpus)


def _with_two_types(scenario: Scenario, mlp_gpu: Gpu, deployment: Deployment) -> Prediction:
    """Other types stand in other hosts: rows go over the network."""
    attn_scenario, mlp_scenario = (
        replace(scenario, gpu=replace(gpu, link_domain_gpus=1)) for gpu in (scenario.gpu, mlp_gpu)
    )
    attn, mlp = predict(attn_scenario, deployment), predict(mlp_scenario, deployment)
    stages = replace(
        attn.stages,
        experts=mlp.stages.experts,
        mlp_us=mlp.stages.mlp_us,
        exchange_us=max(attn.stages.exchange_us, mlp.stages.exchange_us),
    )
    memory = MemoryPlan(roles=(attn.memory.roles[0], mlp.memory.roles[1]))
    return _assembled(scenario, replace(attn, stages=stages, memory=memory), deployment.total_gpus)


def _assembled(scenario: Scenario, parts: Prediction, counted_gpus: int) -> Prediction:
    """Step and rates from stages that come from several predictions."""
    deployment, workload = parts.deployment, scenario.workload
    pipeline = Pipeline(
        attn_us=parts.stages.attn_us,
        mlp_us=parts.stages.mlp_us,
        exchange_us=parts.stages.exchange_us,
        num_layers=scenario.shape.num_moe_layers,
        num_micro_batches=deployment.micro_batches,
        wait_us=parts.stages.wait_us,
    )
    step_us = pipeline.layers_us + parts.outside_layers_us
    tokens = deployment.attn_gpus * deployment.batch_per_attn_gpu * workload.accepted_tokens
    return replace(
        parts,
        step_us=step_us,
        tokens_per_s_per_gpu=tokens * 1e6 / (step_us * counted_gpus),
        tpot_us=step_us / workload.accepted_tokens,
        binding=pipeline.binding,
    )
