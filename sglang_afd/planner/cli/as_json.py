"""Predictions, speed-ups and verdicts as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from sglang_afd.planner.causes import factors, kernels_note
from sglang_afd.planner.cli.inputs import Inputs
from sglang_afd.planner.deployment import Deployment
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.speedup import SpeedUp
from sglang_afd.planner.verdict import Verdict


def write_json(value: object) -> None:
    """On standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def inputs_json(inputs: Inputs) -> dict[str, Any]:
    """What was read."""
    workload = inputs.scenario.workload
    limit = workload.max_tpot_us
    return {
        "model": inputs.scenario.shape.name,
        "gpu": inputs.scenario.gpu.name,
        "source": inputs.source.kind,
        "source_label": inputs.source.label,
        "notes": list(inputs.source.notes),
        "context_tokens": workload.context_tokens,
        "context_std_tokens": workload.context_std_tokens,
        "verify_tokens": workload.verify_tokens,
        "accepted_tokens": workload.accepted_tokens,
        "jitter": inputs.scenario.jitter,
        "max_tpot_ms": None if limit is None else limit / 1000,
        "kv_element_bytes": inputs.scenario.shape.kv_element_bytes,
        "colocated_piece_tokens": inputs.scenario.colocated_piece_tokens,
    }


def deployment_json(deployment: Deployment) -> dict[str, Any]:
    """With the names of the flags."""
    return {
        "label": deployment.label,
        "mode": deployment.mode.value,
        "attn_gpus": deployment.attn_gpus,
        "mlp_gpus": deployment.mlp_gpus,
        "total_gpus": deployment.total_gpus,
        "expert_parallel": deployment.expert_parallel,
        "micro_batches": deployment.micro_batches,
        "batch": deployment.batch_per_attn_gpu,
        "kernels": deployment.expert_kernels.value if deployment.mlp_gpus else None,
    }


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """Times in the unit that the name says."""
    stages = prediction.stages
    return {
        "deployment": deployment_json(prediction.deployment),
        "step_ms": prediction.step_us / 1000,
        "tpot_ms": prediction.tpot_us / 1000,
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_gpu,
        "binding": prediction.binding,
        "layer_us": {
            "attention": stages.attn_us,
            "core": stages.core_us,
            "dense": stages.dense_us,
            "mlp": stages.mlp_us,
            "experts_fixed": stages.experts.fixed_us,
            "experts_weights": stages.experts.weights_us,
            "experts_compute": stages.experts.compute_us,
            "exchange": stages.exchange_us,
            "jitter_wait": stages.wait_us,
        },
        "outside_layers_ms": prediction.outside_layers_us / 1000,
        "memory": [
            {
                "role": role.role,
                "usable_bytes": role.usable_bytes,
                "weight_bytes": role.weight_bytes,
                "buffer_bytes": role.buffer_bytes,
                "kv_capacity_tokens": role.kv_capacity_tokens,
                "kv_needed_tokens": role.kv_needed_tokens,
            }
            for role in prediction.memory.roles
        ],
    }


def speed_up_json(result: SpeedUp) -> dict[str, Any]:
    """The factors with their causes; `total` is their product."""
    return {
        "total": result.total,
        "note": kernels_note(result),
        "factors": [
            {"name": name, "value": value, "cause": cause} for name, value, cause in factors(result)
        ],
    }


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The answer and how sure it is."""
    return {
        "answer": verdict.answer.value,
        "speed_up": verdict.speed_up,
        "low": verdict.low,
        "high": verdict.high,
        "relative_error": verdict.relative_error,
        "probability": verdict.probability,
        "causes": [{"name": cause.name, "share": cause.share} for cause in verdict.causes[:5]],
    }
