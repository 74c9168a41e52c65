"""SGLang's mixture-of-experts building blocks, by the names that we use."""

from __future__ import annotations

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, DispatchOutputFormat
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopKOutput, TopKOutputChecker
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, QuantizationConfig

MOE_CLASS_HOOK = "sglang.srt.layers.moe.ep_moe.layer.get_moe_impl_class"

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
]
