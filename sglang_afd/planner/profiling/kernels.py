"""Kernel names to stages of a decode step (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CORE, DENSE, EXPERTS, EXCHANGE, OUTSIDE = "core", "dense", "experts", "exchange", "outside"
STAGES = (CORE, DENSE, EXPERTS, EXCHANGE, OUTSIDE)

_AS_BEFORE, _AS_NEXT = "as before", "as next"

# The first that matches counts. An activation or a sum belongs to the GEMM before it, which may be
# that of a shared expert; a quantization to the GEMM after it.
_PATTERNS = tuple(
    (stage, re.compile(pattern, re.IGNORECASE))
    for stage, pattern in (
        (CORE, r"\bflash::|flash_?mla|flash_?attn|fmha"),
        (DENSE, r"topk_?gating|topk_softmax|topk_sigmoid|grouped_topk|moe_fused_gate|router"),
        (DENSE, r"moe_?softmax|moe_?topk"),
        (DENSE, r"norm"),  # before the rest of attention, and FlashInfer's are not FlashAttention
        (EXCHANGE, r"nccl|cross_device_reduce|all_?reduce|all_?gather|reduce_scatter|mscclpp"),
        (EXCHANGE, r"deep_?ep|internode|intranode|low_latency"),
        (CORE, r"attn_fwd|attention|mla_decode|sdpa"),
        (CORE, r"_fwd_kernel_stage|_fwd_grouped_kernel|BatchDecode|BatchPrefill|splitkv"),
        (CORE, r"MergeStates|merge_attn|merge_state|prepare_varlen"),
        (_AS_BEFORE, r"act_and_mul|silu|swiglu|gelu"),
        (EXPERTS, r"moe|count_and_sort_expert|expert|m_?grouped|grouped_gemm|GemmType\)[1-9]"),
        (EXPERTS, r"ep_scatter|ep_gather|(pre|post)_reorder|src2dst|align_single_token|tma_align"),
        (_AS_BEFORE, r"triton_\w*fused\w*_sum"),  # of up to 32 tokens, where torch compiles it
        (_AS_NEXT, r"group_quant|per_token_quant|quantize_kernel|quant_fp8|_quant_"),
        (DENSE, r"nvjet|gemm|gemv|gemvx|cublas|cutlass|splitK|wgmma|matmul"),
        (DENSE, r"rope|rotary|store_kv|kv_cache|kv_indices|_metadata|embedding"),
        (
            DENSE,
            r"kv_buffer|cache_flash|concat_mla|scaled_mm|kv_splits|absmax|cache_locs?|last_loc",
        ),
        (DENSE, r"elementwise|copy|memcpy|memset|cast|convert|fill|index|gather|scatter|where"),
        (DENSE, r"reduce_?kernel|argmax|softmax|sort|scan|arange|cat_?array|triton_(poi|red|per)_"),
        (DENSE, r"alloc_decode|alloc_extend|req_to_token|position|topk|at::native|cub::"),
    )
)
_LAYER_START = re.compile(r"norm|nvjet|gemm", re.IGNORECASE)


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel on the device."""

    name: str
    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        """When it was done."""
        return self.start_ns + self.duration_ns


def stages_of(names: Sequence[str]) -> list[str | None]:
    """The stage of each kernel of a sequence; None for those that no pattern matches."""
    found = [_match(name) for name in names]
    _settle(found, _AS_BEFORE, range(len(found)))
    _settle(found, _AS_NEXT, range(len(found) - 1, -1, -1))
    return found


def layers_between(names: Sequence[str], stages: Sequence[str | None]) -> tuple[int, int]:
    """First kernel of the first layer, and the one behind the last layer.

    The layers begin with a norm or a GEMM and end with the last kernel of the experts.
    """
    starts = [index for index, name in enumerate(names) if _LAYER_START.search(name)]
    experts = [index for index, stage in enumerate(stages) if stage == EXPERTS]
    if not starts or not experts or starts[0] > experts[-1]:
        return 0, 0
    return starts[0], experts[-1] + 1


def unmatched(names: Iterable[str]) -> set[str]:
    """Of these, the ones that no pattern matches."""
    return {name for name in names if _match(name) is None}


def _match(name: str) -> str | None:
    for stage, pattern in _PATTERNS:
        if pattern.search(name):
            return stage
    return None


def _settle(found: list[str | None], mark: str, order: Iterable[int]) -> None:
    """Replace marks by the stage of the GEMM or experts last seen in this order."""
    last = DENSE
    for index in order:
        stage = found[index]
        if stage == mark:
            found[index] = last
        elif stage in (DENSE, EXPERTS):
            last = stage
