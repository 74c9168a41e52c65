"""SGLang's mixture-of-experts building blocks, by the names that we use."""

from __future__ import annotations

from contextlib import AbstractContextManager

from sglang.srt.layers.deep_gemm_wrapper import configure_deep_gemm_num_sms
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, DispatchOutputFormat
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopKOutput, TopKOutputChecker
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, QuantizationConfig

MOE_CLASS_HOOK = "sglang.srt.layers.moe.ep_moe.layer.get_moe_impl_class"

# The runners whose kernels leave out choices of expert -1, which are other ranks' or nobody's.
_RUNNERS_FOR_MINUS_1 = ("triton", "deep_gemm")

__all__ = [
    "MOE_CLASS_HOOK",
    "BaseDispatcher",
    "DispatchOutputFormat",
    "FusedMoE",
    "FusedMoEMethodBase",
    "QuantizationConfig",
    "StandardDispatchOutput",
    "StandardTopKOutput",
    "TopKOutput",
    "TopKOutputChecker",
    "limit_deep_gemm",
    "prepare_for_device_rows",
]


def prepare_for_device_rows(layer: FusedMoE) -> str | None:
    """Let `run_moe_core` take rows in place whose choices may be -1; for a GPU.

    SGLang's Triton runner looks for -1 only where a rank owns a part of the experts, and would
    otherwise read the weights of an expert -1. Its config tells by the number of all experts, which
    is "not known" from here on. DeepGEMM's runner always looks. Both may write over their input, or
    give its memory back, which the staging buffers must not see.

    Returns: The name of a runner that cannot take such rows, or None.
    """
    runner = layer.quant_method.runner.runner_backend.value
    if runner not in _RUNNERS_FOR_MINUS_1:
        return str(runner)
    if runner == "triton":
        layer.moe_runner_config.num_experts = None
    layer.moe_runner_config.inplace = False
    return None


def limit_deep_gemm(num_sms: int) -> AbstractContextManager[None]:
    """Within it DeepGEMM's kernels use so many multiprocessors; 0 leaves them all."""
    limit: AbstractContextManager[None] = configure_deep_gemm_num_sms(num_sms or None)
    return limit
