"""One cause for each factor of a speed-up, in words."""

from __future__ import annotations

from sglang_afd.planner.deployment import ExpertKernels
from sglang_afd.planner.gpu import GIB
from sglang_afd.planner.pipeline import ATTENTION, MLP
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.speedup import SpeedUp


def batch_cause(result: SpeedUp) -> str:
    """Why the batch is another one."""
    base, other = result.colocated, result.disaggregated
    before, after = base.deployment.batch_per_attn_gpu, other.deployment.batch_per_attn_gpu
    if before == after:
        return f"the same batch of {before}"
    if result.batch_gain < 1:
        return (
            f"batch {before} -> {after}: a colocated GPU gives less at that batch, if it had room"
        )
    role = base.memory.roles[0]
    is_full = before + 1 > role.kv_capacity_tokens / role.kv_needed_tokens * before
    gained = (role.weight_bytes - other.memory.roles[0].weight_bytes) / GIB
    if after > before and is_full and gained > 0:
        return (
            f"batch {before} -> {after}: an attention GPU holds {gained:.0f} GiB less of weights, "
            "so more cache"
        )
    if after > before and not is_full:
        return f"batch {before} -> {after}: shorter steps leave time for more requests"
    return f"batch {before} -> {after} of an attention GPU"


def overlap_cause(result: SpeedUp) -> str:
    """What the experts' time hides behind, or what waits."""
    other = result.disaggregated
    stages, count = other.stages, other.deployment.micro_batches
    if count == 1:
        return "one micro-batch: attention and experts take turns, nothing overlaps"
    if other.binding == ATTENTION:
        return (
            f"experts ({stages.mlp_us:.0f} us a layer and micro-batch) run behind attention "
            f"({stages.attn_us:.0f} us)"
        )
    if other.binding == MLP:
        return (
            f"attention ({stages.attn_us:.0f} us a layer and micro-batch) waits for the experts "
            f"({stages.mlp_us:.0f} us)"
        )
    both = stages.attn_us + stages.wait_us + stages.mlp_us + 2 * stages.exchange_us
    return (
        f"a round trip ({both:.0f} us a layer) is longer than {count} micro-batches of the longer "
        f"stage ({max(stages.attn_us, stages.mlp_us):.0f} us)"
    )


def cost_cause(result: SpeedUp) -> str:
    """Who does not attend."""
    deployment = result.disaggregated.deployment
    return f"{deployment.mlp_gpus} of {deployment.total_gpus} GPUs do not attend"


def factors(result: SpeedUp) -> tuple[tuple[str, float, str], ...]:
    """Name, value and cause of each; their product is the speed-up."""
    return (
        ("batch gain", result.batch_gain, batch_cause(result)),
        ("overlap gain", result.overlap_gain, overlap_cause(result)),
        ("disaggregation cost", result.disaggregation_cost, cost_cause(result)),
    )


def kernels_note(result: SpeedUp) -> str:
    """What else than the disaggregation the two sides differ in; empty if nothing."""
    if result.disaggregated.deployment.expert_kernels is not ExpertKernels.FUSED:
        return ""
    return "fused kernels on one side only: part of the overlap gain is the kernel's"


def describe_binding(prediction: Prediction) -> str:
    """What a step is waiting for."""
    if prediction.binding in (ATTENTION, MLP):
        return f"the {prediction.binding} stage"
    return {"round trip": "the round trip of a micro-batch"}.get(
        prediction.binding, "nothing: its parts run one after another"
    )
