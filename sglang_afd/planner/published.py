"""Deployments that FastAFD measured and published, for checks against their numbers."""

from __future__ import annotations

from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode


def afd(attn_gpus: int, batch: int, mode: Mode = Mode.AFD, fused: bool = True) -> Deployment:
    """Four MLP GPUs in one expert-parallel group, two micro-batches.

    Args:
        attn_gpus: Attention GPUs.
        batch: Of each of them.
        mode: AFD, or core attention alone apart.
        fused: Whether the experts are FastAFD's fused kernel; else DeepEP and grouped GEMMs.
    """
    return Deployment(
        mode=mode,
        attn_gpus=attn_gpus,
        mlp_gpus=4,
        expert_parallel=4,
        micro_batches=2,
        batch_per_attn_gpu=batch,
        expert_kernels=ExpertKernels.FUSED if fused else ExpertKernels.GROUPED,
    )


def colocated(ranks: int, batch: int) -> Deployment:
    """vLLM, with attention data parallel and the experts over all ranks."""
    return Deployment(
        mode=Mode.COLOCATED, attn_gpus=ranks, expert_parallel=ranks, batch_per_attn_gpu=batch
    )
