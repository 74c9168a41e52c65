"""Reads public measurements: descriptions apart from measured values, so that neither leaks.

The schema is that of the FastAFD collection: `models`, `hardware`, `records`. A record that has a
context and a measured step is a row; the others (capacities, kernel tables) are not predicted here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode, Workload
from sglang_afd.planner.gpu import Gpu, known_gpu
from sglang_afd.planner.known_models import CONFIGS, known_shape
from sglang_afd.planner.predict import Scenario
from sglang_afd.planner.shape import ModelShape

# Used where a file describes a model without its vocabulary: the head is 0.5 % of a step.
_VOCABULARY = 150_000

# vLLM runs a larger batch through the experts in pieces of this many tokens per rank.
# Source: VLLM_MOE_DP_CHUNK_SIZE, default 256; the low-latency dispatch buffers are sized by it.
VLLM_PIECE_TOKENS = 256

# The clock of a system: CUDA spans for colocated rows, the coordinator's for AFD rows.
_STEP_FIELDS = ("step_ms_cuda", "step_ms")
_RATE_FIELDS = ("tok_s_gpu_cuda", "tok_s_gpu")

# Everything a description may say. All other fields of a record are results, or about results.
_DESCRIPTION_FIELDS = frozenset(
    {
        "id",
        "kind",
        "model",
        "hardware",
        "context",
        "context_std",
        "attn_gpus",
        "ffn_gpus",
        "total_gpus",
        "batch_per_attn_gpu",
        "batch_per_gpu",
        "ep",
        "dp",
        "ffn_ep",
        "num_mb",
        "mode",
        "placement",
        "moe_backend",
        "kv_dtype",
        "weight_dtype",
        "verify_tokens",
        "accepted_tokens",
    }
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a prediction may know of a measured row."""

    id: str
    kind: str
    scenario: Scenario
    deployment: Deployment


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """A row with its result; the predictor never sees one."""

    row: Row
    step_us: float


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A record with a step that is not compared, and why."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Collection:
    """All rows of a file, in its order."""

    rows: tuple[MeasuredRow, ...]
    skipped: tuple[Skipped, ...]


def read_collection(path: Path, strict: bool = True) -> Collection:
    """All rows of a file of the schema.

    Args:
        path: Of the JSON file.
        strict: Raise at a record that cannot be described; otherwise list it as skipped.
    Raises: ConfigError, naming the record and the field.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no readable JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("records"), list):
        raise ConfigError(f"{path}: wanted an object with a list `records`")
    rows, skipped = [], []
    for record in data["records"]:
        try:
            found = _read_record(record, data.get("models", {}), data.get("hardware", {}))
        except ConfigError as error:
            if strict:
                raise
            found = Skipped(id=str(record.get("id")), reason=str(error))
        if isinstance(found, MeasuredRow):
            rows.append(found)
        elif found:
            skipped.append(found)
    if not rows:
        raise ConfigError(f"{path}: no record has a context and a measured step")
    return Collection(rows=tuple(rows), skipped=tuple(skipped))


def _read_record(
    record: Mapping[str, Any], models: Mapping[str, Any], hardware: Mapping[str, Any]
) -> MeasuredRow | Skipped | None:
    """None for records that are no steps."""
    step_us = measured_step_us(record)
    if "context" not in record:
        return None
    name = str(record.get("id"))
    if step_us is None:
        return Skipped(id=name, reason="no step and no rate on the clock of its system")
    verdict = str(record.get("plausibility", "ok"))
    if verdict != "ok":
        return Skipped(id=name, reason=f"marked at its source: {verdict}")
    return MeasuredRow(row=describe(record, models, hardware), step_us=step_us)


def measured_step_us(record: Mapping[str, Any]) -> float | None:
    """The result of a record; None when it has none.

    Raises: ConfigError, when step time and rate contradict each other, as they do in other units.
    """
    step_ms = _first_number(record, _STEP_FIELDS)
    rate = _first_number(record, _RATE_FIELDS)
    from_rate = None
    if rate:
        batch = _number(record, "batch_per_attn_gpu", "batch_per_gpu")
        share = _optional(record, "attn_gpus", 1) / (
            _number(record, "total_gpus") if "attn_gpus" in record else 1
        )
        from_rate = batch * share * _optional(record, "accepted_tokens", 1) / rate * 1e6
    if step_ms is None:
        return from_rate
    step_us = step_ms * 1000
    if step_us <= 0 or (from_rate and not 0.5 < step_us / from_rate < 2):
        raise ConfigError(
            f"record {record.get('id')}: a step of {step_ms:g} ms and {rate} tokens/s per GPU, "
            f"which is a step of {(from_rate or 0) / 1000:g} ms; is one of them in another unit?"
        )
    return step_us


def describe(
    record: Mapping[str, Any], models: Mapping[str, Any], hardware: Mapping[str, Any]
) -> Row:
    """The description of a record; reads the fields of a description and no others."""
    seen = {key: value for key, value in record.items() if key in _DESCRIPTION_FIELDS}
    shape = _shape(seen, models)
    workload = Workload(
        context_tokens=_number(seen, "context"),
        context_std_tokens=_optional(seen, "context_std", 0),
        verify_tokens=int(_optional(seen, "verify_tokens", 1)),
        accepted_tokens=_optional(seen, "accepted_tokens", 1),
    )
    return Row(
        id=str(seen.get("id", "?")),
        kind=str(seen.get("kind", "?")),
        scenario=Scenario(
            shape=shape,
            gpu=_gpu(seen, hardware),
            workload=workload,
            colocated_piece_tokens=_piece_tokens(seen),
        ),
        deployment=_deployment(seen),
    )


def _piece_tokens(seen: Mapping[str, Any]) -> int | None:
    """By the engine that the kind of a record begins with, as in `vllm_decode`.

    The colocated systems of this schema's sources are vLLM with the low-latency dispatch, so that a
    kind without an engine is taken for it. A disaggregated row has no colocated experts.
    """
    return None if str(seen.get("kind", "")).lower().startswith("sglang") else VLLM_PIECE_TOKENS


def _deployment(seen: Mapping[str, Any]) -> Deployment:
    if "attn_gpus" not in seen:
        ranks = int(_number(seen, "ep", "dp", "total_gpus"))
        return Deployment(
            mode=Mode.COLOCATED,
            attn_gpus=int(_optional(seen, "total_gpus", ranks)),
            expert_parallel=ranks,
            batch_per_attn_gpu=int(_number(seen, "batch_per_gpu")),
        )
    batch = int(_number(seen, "batch_per_attn_gpu", "batch_per_gpu"))
    mlp_gpus = int(_number(seen, "ffn_gpus"))
    return Deployment(
        mode=Mode.CORE_ONLY if _is_core_only(seen) else Mode.AFD,
        attn_gpus=int(_number(seen, "attn_gpus")),
        mlp_gpus=mlp_gpus,
        expert_parallel=int(_optional(seen, "ffn_ep", mlp_gpus)),
        micro_batches=min(int(_optional(seen, "num_mb", 2)), batch),
        batch_per_attn_gpu=batch,
        expert_kernels=_expert_kernels(seen),
    )


def _expert_kernels(seen: Mapping[str, Any]) -> ExpertKernels:
    backend = str(seen.get("moe_backend", "megamoe")).lower()
    return ExpertKernels.FUSED if "mega" in backend else ExpertKernels.GROUPED


def _is_core_only(seen: Mapping[str, Any]) -> bool:
    words = " ".join(str(seen.get(key, "")).lower() for key in ("mode", "placement", "kind"))
    return any(word in words for word in ("fmha", "cad", "core_only"))


def _shape(seen: Mapping[str, Any], models: Mapping[str, Any]) -> ModelShape:
    name = str(seen.get("model", ""))
    fields = models.get(name)
    shape = _shape_from_fields(name, fields) if isinstance(fields, Mapping) else known_shape(name)
    kv_bytes = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
    kv_dtype = str(seen.get("kv_dtype", "bf16")).lower()
    matching = [size for key, size in kv_bytes.items() if kv_dtype.startswith(key)]
    if not matching:
        raise ConfigError(f"record {seen.get('id')}: kv_dtype {kv_dtype!r}; wanted bf16 or fp8")
    return replace(shape, kv_element_bytes=matching[0])


def _shape_from_fields(name: str, fields: Mapping[str, Any]) -> ModelShape:
    """A model as the collection describes it."""
    plain = name.rsplit("/", 1)[-1].removesuffix("-FP8")
    vocabulary = CONFIGS.get(plain, {}).get("vocab_size", _VOCABULARY)
    heads, kv_heads = int(_number(fields, "q_heads")), int(_number(fields, "kv_heads"))
    head_dim, hidden = int(_number(fields, "head_dim")), int(_number(fields, "hidden"))
    layers = int(_number(fields, "layers"))
    moe_intermediate = int(_number(fields, "moe_intermediate"))
    kv_elements = _optional(fields, "kv_bytes_per_token_bf16", 0) / 2
    kv_layers = int(_optional(fields, "kv_layers", layers))
    return ModelShape(
        name=name,
        num_layers=layers,
        num_moe_layers=int(_optional(fields, "moe_layers", layers)),
        num_kv_layers=kv_layers,
        hidden_size=hidden,
        num_experts=int(_number(fields, "experts")),
        experts_per_token=int(_number(fields, "topk")),
        moe_intermediate_size=moe_intermediate,
        shared_intermediate_size=int(_optional(fields, "shared", 0)) * moe_intermediate,
        attention_weights=2 * hidden * head_dim * (heads + kv_heads),
        kv_elements_per_token=round(kv_elements / kv_layers) or 2 * kv_heads * head_dim,
        core_flops_per_cached_token=4 * heads * head_dim,
        vocab_size=int(vocabulary),
        weight_bytes=1.0 if "fp8" in name.lower() else 0.5 if "fp4" in name.lower() else 2.0,
    )


def _gpu(seen: Mapping[str, Any], hardware: Mapping[str, Any]) -> Gpu:
    only = next(iter(hardware)) if len(hardware) == 1 else ""
    gpu = known_gpu(str(seen.get("hardware") or only))
    stated = hardware.get(gpu.name)
    if not isinstance(stated, Mapping):
        return gpu
    return replace(
        gpu,
        hbm_bytes_per_us=_optional(stated, "hbm_TBs", gpu.hbm_bytes_per_us / 1e6) * 1e6,
        gpus_per_node=int(_optional(stated, "gpus_per_tray", gpu.gpus_per_node)),
        link_domain_gpus=int(_optional(stated, "nvlink_domain", gpu.link_domain_gpus)),
    )


def _first_number(record: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    for key in keys:
        if record.get(key) is not None:
            return _number(record, key)
    return None


def _number(record: Mapping[str, Any], *keys: str) -> float:
    for key in keys:
        value = record.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"record {record.get('id')}: {key} is {value!r}, wanted a number")
        return float(value)
    raise ConfigError(f"record {record.get('id')}: has no {' or '.join(keys)}")


def _optional(record: Mapping[str, Any], key: str, default: float) -> float:
    return float(default) if record.get(key) is None else _number(record, key)
