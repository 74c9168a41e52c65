"""Random weights under which tokens differ and spread over the experts.

SGLang's dummy weights are within 0.001, norms included: router scores are then equal but for
rounding, and the same few experts may win every time. Times of the experts depend on who wins.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """Fill what is not quantized, by name: norms with 1, matrices with variance 1 over inputs."""
    for name, parameter in model.named_parameters():
        data = parameter.data
        if not data.is_floating_point() or torch.finfo(data.dtype).bits < 16 or "scale" in name:
            continue
        if data.dim() >= 2:
            variance = 1.0 if "embed" in name else 1.0 / data.shape[-1]
            _uniform(data, math.sqrt(3 * variance), name)
        elif "norm" in name:
            data.fill_(1.0)


def _uniform(data: Tensor, limit: float, name: str) -> None:
    generator = torch.Generator(device=data.device)
    generator.manual_seed(zlib.crc32(name.encode()))
    data.uniform_(-limit, limit, generator=generator)
