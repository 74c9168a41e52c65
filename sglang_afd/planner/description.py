"""Describes a record of public measurements: model, GPU, workload and deployment, no result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode, Workload
from sglang_afd.planner.gpu import Gpu, known_gpu
from sglang_afd.planner.known_models import CONFIGS, known_shape
from sglang_afd.planner.record_fields import number, optional, optional_whole, text, whole
from sglang_afd.planner.scenario import Scenario, check_experts
from sglang_afd.planner.shape import ModelShape

# Used where a file describes a model without its vocabulary: the head is 0.5 % of a step.
_VOCABULARY = 150_000

# vLLM runs a larger batch through the experts in pieces of this many tokens per rank.
# Source: VLLM_MOE_DP_CHUNK_SIZE, default 256; the low-latency dispatch buffers are sized by it.
VLLM_PIECE_TOKENS = 256

_DTYPE_BYTES = {"bf16": 2.0, "bfloat16": 2.0, "fp16": 2.0, "float16": 2.0, "fp8": 1.0, "fp4": 0.5}

# Everything a description may say. All other fields of a record are results, or about results.
DESCRIPTION_FIELDS = frozenset(
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
        "attn_tp",
        "mlp_tp",
        "tp",
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


def describe(
    record: Mapping[str, Any], models: Mapping[str, Any], hardware: Mapping[str, Any]
) -> Row:
    """The description of a record; reads the fields of a description and no others.

    Raises: ConfigError, naming the record or the model, and the field.
    """
    seen = {key: value for key, value in record.items() if key in DESCRIPTION_FIELDS}
    _refuse_tensor_parallelism(seen)
    shape, deployment = _shape(seen, models), _deployment(seen)
    check_experts(shape, deployment)
    workload = Workload(
        context_tokens=number(seen, "context"),
        context_std_tokens=optional(seen, "context_std", 0),
        verify_tokens=optional_whole(seen, "verify_tokens", 1),
        accepted_tokens=optional(seen, "accepted_tokens", 1),
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
        deployment=deployment,
    )


def _refuse_tensor_parallelism(seen: Mapping[str, Any]) -> None:
    """What no measurement could check is not guessed: no row of the sources has any."""
    for key in ("attn_tp", "mlp_tp", "tp"):
        ranks = optional_whole(seen, key, 1)
        if ranks != 1:
            raise ConfigError(
                f"record {seen.get('id')}: {key} is {ranks}; layers that several GPUs share by "
                "tensor parallelism are not modelled, wanted 1"
            )


def _piece_tokens(seen: Mapping[str, Any]) -> int | None:
    """By the engine that the kind of a record begins with, as in `vllm_decode`.

    The colocated systems of this schema's sources are vLLM with the low-latency dispatch, so that a
    kind without an engine is taken for it. A disaggregated row has no colocated experts.
    """
    return None if text(seen, "kind", "").startswith("sglang") else VLLM_PIECE_TOKENS


def _deployment(seen: Mapping[str, Any]) -> Deployment:
    if seen.get("attn_gpus") is None:
        ranks = whole(seen, "ep", "dp", "total_gpus")
        return Deployment(
            mode=Mode.COLOCATED,
            attn_gpus=optional_whole(seen, "total_gpus", ranks),
            expert_parallel=ranks,
            batch_per_attn_gpu=whole(seen, "batch_per_gpu"),
        )
    batch = whole(seen, "batch_per_attn_gpu", "batch_per_gpu")
    mlp_gpus = whole(seen, "ffn_gpus")
    return Deployment(
        mode=Mode.CORE_ONLY if _is_core_only(seen) else Mode.AFD,
        attn_gpus=whole(seen, "attn_gpus"),
        mlp_gpus=mlp_gpus,
        expert_parallel=optional_whole(seen, "ffn_ep", mlp_gpus),
        micro_batches=min(optional_whole(seen, "num_mb", 2), batch),
        batch_per_attn_gpu=batch,
        expert_kernels=_expert_kernels(seen),
    )


def _expert_kernels(seen: Mapping[str, Any]) -> ExpertKernels:
    backend = text(seen, "moe_backend", "megamoe")
    return ExpertKernels.FUSED if "mega" in backend else ExpertKernels.GROUPED


def _is_core_only(seen: Mapping[str, Any]) -> bool:
    words = " ".join(text(seen, key, "") for key in ("mode", "placement", "kind"))
    return any(word in words for word in ("fmha", "cad", "core_only"))


def _shape(seen: Mapping[str, Any], models: Mapping[str, Any]) -> ModelShape:
    name = str(seen.get("model", ""))
    fields = models.get(name)
    shape = _shape_from_fields(name, fields) if isinstance(fields, Mapping) else known_shape(name)
    return replace(
        shape,
        kv_element_bytes=_bytes(seen, "kv_dtype", 2.0),
        weight_bytes=_bytes(seen, "weight_dtype", shape.weight_bytes),
    )


def _bytes(seen: Mapping[str, Any], key: str, default: float) -> float:
    """Of one number of this type."""
    dtype = text(seen, key, "")
    if not dtype:
        return default
    for known, size in _DTYPE_BYTES.items():
        if dtype.startswith(known):
            return size
    raise ConfigError(
        f"record {seen.get('id')}: {key} {dtype!r}; wanted one of {', '.join(_DTYPE_BYTES)}"
    )


def _shape_from_fields(name: str, fields: Mapping[str, Any]) -> ModelShape:
    """A model as the collection describes it.

    Raises: ConfigError, naming the model.
    """
    try:
        return _checked_shape(name, fields)
    except ConfigError as error:
        raise ConfigError(f"model {name!r}: {error}") from error


def _checked_shape(name: str, fields: Mapping[str, Any]) -> ModelShape:
    plain = name.rsplit("/", 1)[-1].removesuffix("-FP8")
    vocabulary = CONFIGS.get(plain, {}).get("vocab_size", _VOCABULARY)
    heads, kv_heads = whole(fields, "q_heads"), whole(fields, "kv_heads")
    head_dim, hidden = whole(fields, "head_dim"), whole(fields, "hidden")
    layers = whole(fields, "layers")
    moe_intermediate = whole(fields, "moe_intermediate")
    kv_elements = optional(fields, "kv_bytes_per_token_bf16", 0) / 2
    kv_layers = optional_whole(fields, "kv_layers", layers)
    for count, value in (("q_heads", heads), ("kv_heads", kv_heads), ("kv_layers", kv_layers)):
        checks.whole("its description", count, value)
    checks.not_negative("its description", "kv_bytes_per_token_bf16", kv_elements)
    return ModelShape(
        name=name,
        num_layers=layers,
        num_moe_layers=optional_whole(fields, "moe_layers", layers),
        num_kv_layers=kv_layers,
        hidden_size=hidden,
        num_experts=whole(fields, "experts"),
        experts_per_token=whole(fields, "topk"),
        moe_intermediate_size=moe_intermediate,
        shared_intermediate_size=optional_whole(fields, "shared", 0) * moe_intermediate,
        attention_weights=2 * hidden * head_dim * (heads + kv_heads),
        kv_elements_per_token=round(kv_elements / kv_layers) or 2 * kv_heads * head_dim,
        core_flops_per_cached_token=4 * heads * head_dim,
        vocab_size=int(vocabulary),
        weight_bytes=_named_weight_bytes(name, plain),
    )


def _named_weight_bytes(name: str, plain: str) -> float:
    """By the name; else as published, for a model that is known."""
    for dtype, size in (("fp8", 1.0), ("fp4", 0.5)):
        if dtype in name.lower():
            return size
    return known_shape(plain).weight_bytes if plain in CONFIGS else 2.0


def _gpu(seen: Mapping[str, Any], hardware: Mapping[str, Any]) -> Gpu:
    only = next(iter(hardware)) if len(hardware) == 1 else ""
    gpu = known_gpu(str(seen.get("hardware") or only))
    stated = hardware.get(gpu.name)
    if not isinstance(stated, Mapping):
        return gpu
    return replace(
        gpu,
        hbm_bytes_per_us=optional(stated, "hbm_TBs", gpu.hbm_bytes_per_us / 1e6) * 1e6,
        gpus_per_node=optional_whole(stated, "gpus_per_tray", gpu.gpus_per_node),
        link_domain_gpus=optional_whole(stated, "nvlink_domain", gpu.link_domain_gpus),
    )
