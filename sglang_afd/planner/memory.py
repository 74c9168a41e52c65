"""What fits into the memory of each role, and how many tokens of cache are left."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Deployment, Mode, Workload
from sglang_afd.planner.gpu import GIB, Gpu
from sglang_afd.planner.shape import ModelShape

# Source: vLLM on GB200, weights + cache = 165.7 of 183.5 GiB at expert parallelism 8 to 64.
USABLE_FRACTION = 0.90
# Source: FastAFD, about 2.4 GiB of exchange buffers per micro-batch at a ratio of 16:1.
BUFFER_BYTES_PER_MICRO_BATCH = 2.4 * GIB


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Of one GPU."""

    role: str
    usable_bytes: float
    weight_bytes: float
    buffer_bytes: float
    kv_capacity_tokens: int
    kv_needed_tokens: float

    @property
    def weights_fit(self) -> bool:
        """Whether weights and buffers leave room for anything."""
        return self.weight_bytes + self.buffer_bytes <= self.usable_bytes

    @property
    def fits(self) -> bool:
        """Whether weights, buffers and the cache of the batch fit."""
        return self.weights_fit and self.kv_needed_tokens <= self.kv_capacity_tokens


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Of all roles of a deployment."""

    roles: tuple[RoleMemory, ...]

    @property
    def fits(self) -> bool:
        """Whether every role fits."""
        return all(role.fits for role in self.roles)

    def require_fit(self, deployment: Deployment) -> None:
        """Raise ConfigError, with what would fit, when one role does not."""
        for role in self.roles:
            taken = role.weight_bytes + role.buffer_bytes
            if not role.weights_fit:
                raise ConfigError(
                    f"deployment {deployment.label}: each {role.role} GPU has "
                    f"{role.usable_bytes / GIB:.1f} GiB, and weights and buffers need "
                    f"{taken / GIB:.1f} GiB there before any cache; raise the expert parallelism"
                )
            if not role.fits:
                per_request = role.kv_needed_tokens / deployment.batch_per_attn_gpu
                largest = int(role.kv_capacity_tokens / per_request)
                raise ConfigError(
                    f"deployment {deployment.label}: the cache of {deployment.batch_per_attn_gpu} "
                    f"requests needs {role.kv_needed_tokens:.0f} tokens on each {role.role} GPU, "
                    f"which has room for {role.kv_capacity_tokens}; lower the batch to {largest}"
                )


def plan_memory(
    shape: ModelShape,
    gpu: Gpu,
    workload: Workload,
    deployment: Deployment,
    usable_fraction: float = USABLE_FRACTION,
) -> MemoryPlan:
    """Weights, buffers and cache of each role; the plan's `require_fit` refuses too much."""
    experts = shape.all_expert_bytes / deployment.expert_parallel
    dense = shape.all_dense_bytes
    usable = gpu.memory_bytes * usable_fraction
    tokens = deployment.batch_per_attn_gpu * (workload.context_tokens + workload.verify_tokens)
    buffers = deployment.micro_batches * BUFFER_BYTES_PER_MICRO_BATCH

    def role(name: str, weights: float, buffer: float, needed_tokens: float) -> RoleMemory:
        left = usable - weights - buffer
        capacity = max(int(left / shape.kv_bytes_per_token), 0)
        return RoleMemory(
            role=name,
            usable_bytes=usable,
            weight_bytes=weights,
            buffer_bytes=buffer,
            kv_capacity_tokens=capacity,
            kv_needed_tokens=needed_tokens,
        )

    if deployment.mode is Mode.COLOCATED:
        return MemoryPlan(roles=(role("colocated", dense + experts, 0.0, tokens),))
    if deployment.mode is Mode.CORE_ONLY:
        return MemoryPlan(
            roles=(
                role("attention", 0.0, buffers, tokens),
                role("mlp", dense + experts, buffers, 0.0),
            )
        )
    return MemoryPlan(
        roles=(role("attention", dense, buffers, tokens), role("mlp", experts, buffers, 0.0))
    )


def largest_batch(
    shape: ModelShape,
    gpu: Gpu,
    workload: Workload,
    deployment: Deployment,
    usable_fraction: float = USABLE_FRACTION,
) -> int:
    """Requests per attention GPU that fit; 0 when not even one does."""
    one = deployment.with_batch(deployment.micro_batches)
    plan = plan_memory(shape, gpu, workload, one, usable_fraction)
    if not all(role.weights_fit for role in plan.roles):
        return 0
    capacity = min(role.kv_capacity_tokens for role in plan.roles if role.kv_needed_tokens)
    return int(capacity / (workload.context_tokens + workload.verify_tokens))
