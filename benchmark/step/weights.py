"""Weights by seed and name: equal on both sides, however the experts are dealt out.

SGLang's dummy weights depend on a parameter's size alone, so a rank that owns half of the experts
gets others than the first half of the whole; they are within 0.001 around zero, norms too, which
makes block-quantised weights zeros. Here every parameter, and every expert of one, has a seed of
its own, made of its name. Norms are 1; matrices are uniform with a variance of 1 over their inputs,
embeddings with variance 1. So rows stay different from each other and the routing stays spread.
"""

from __future__ import annotations

import math
import os
import zlib

import torch
from torch import Tensor, nn

FAULT_ENV = "BENCH_STEP_FAULT"  # "1" gives the MLP role other experts, which logits must show
_FP8_LIMIT = 240.0  # raw values of block-quantised weights; their scale makes the variance right


def fill_model(model: nn.Module) -> None:
    """Fill every parameter in place; experts as `fill_experts` does."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    inside: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            fill_experts(module)
            inside.update(f"{name}.{inner}" for inner, _ in module.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in inside:
            _fill(parameter.data, name, is_embedding="embed_tokens" in name)


def fill_experts(layer: nn.Module) -> None:
    """Fill the experts that one rank owns of a layer.

    Args:
        layer: A `FusedMoE`; the first dimension of its parameters is the expert.
    """
    first = layer.moe_ep_rank * layer.num_local_experts
    for name, parameter in layer.named_parameters():
        for local in range(parameter.shape[0]):
            _fill(parameter.data[local], f"{layer.layer_id}.{name}.{first + local}")


def _fill(data: Tensor, name: str, *, is_embedding: bool = False) -> None:
    if not data.is_floating_point():
        return
    if data.dim() < 2:
        data.fill_(0.0 if name.endswith("bias") else 1.0)
    elif name.rpartition(".")[0].endswith("scale_inv") or name.endswith("scale_inv"):
        data.fill_(scale_of(data.shape[-1] * 128))
    elif torch.finfo(data.dtype).bits < 16:
        raw = torch.empty(data.shape, dtype=torch.float16, device=data.device)
        _uniform(raw, _FP8_LIMIT, name)
        data.copy_(raw.to(data.dtype))
    else:
        variance = 1.0 if is_embedding else 1.0 / data.shape[-1]
        _uniform(data, math.sqrt(3 * variance), name)


def scale_of(num_inputs: int) -> float:
    """What makes values of +-_FP8_LIMIT a matrix of variance 1 over its inputs."""
    return math.sqrt(3 / num_inputs) / _FP8_LIMIT


def _uniform(data: Tensor, limit: float, name: str) -> None:
    generator = torch.Generator(device=data.device)
    generator.manual_seed(zlib.crc32(name.encode()))
    data.uniform_(-limit, limit, generator=generator)


def replace_dummy_weights() -> None:
    """Have SGLang's loader of dummy weights, and ours of the MLP role, fill by name."""
    from sglang.srt.model_loader import loader

    from sglang_afd.upstream import environment

    loader.initialize_dummy_weights = fill_model
    environment.fill_dummy = fill_experts if os.environ.get(FAULT_ENV) != "1" else _fill_wrongly


def _fill_wrongly(layer: nn.Module) -> None:
    fill_experts(layer)
    for parameter in layer.parameters():
        parameter.data[0].neg_()
