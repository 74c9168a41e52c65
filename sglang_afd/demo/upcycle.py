"""One dense MLP becomes several experts of different weights that compute the same function."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sglang_afd.demo.recipe import Recipe

_SCALES = (0.5, 1.0, 2.0, -0.5, -1.0, -2.0)

# Measured on SmolLM2's hidden states: at 1.0 the second expert's weight is next to nothing in the
# last layers, at 0.5 it is a quarter or so everywhere.
_ROUTER_STD = 0.5


def upcycle_mlp(
    dense: Mapping[str, Tensor], recipe: Recipe, rng: np.random.Generator
) -> dict[str, Tensor]:
    """Make the MoE block of one layer.

    Every expert is the dense MLP with its neurons in another order, each neuron's up_proj row
    multiplied by a signed power of two and its down_proj column divided by it. Powers of two are
    exact in bf16, so all experts are one function up to the order of summation, and any routing
    whose weights add up to one answers as the dense model does.

    Args:
        dense: gate_proj and up_proj [I, H], down_proj [H, I]; any float dtype, cpu.
        recipe: Number of experts.
        rng: Advanced by this call; the same state gives the same experts.
    Returns: Tensors by their name inside model.layers.N.mlp, in the dtype of dense. The router's
        weight is [E, H], drawn so that a token's chosen weights are of comparable size and its
        experts spread evenly.
    """
    gate, up, down = dense["gate_proj"], dense["up_proj"], dense["down_proj"]
    intermediate_size, hidden_size = gate.shape
    router = _ROUTER_STD * rng.standard_normal((recipe.num_experts, hidden_size))
    block = {
        "gate.weight": torch.from_numpy(router).to(gate.dtype),
        # There is no shared expert, but SGLang gives every Qwen2-MoE block the gate of one.
        "shared_expert_gate.weight": gate.new_zeros(1, hidden_size),
    }
    for expert_id in range(recipe.num_experts):
        order = torch.from_numpy(rng.permutation(intermediate_size))
        scale = torch.from_numpy(rng.choice(_SCALES, intermediate_size)).to(gate.dtype)
        block |= {
            f"experts.{expert_id}.gate_proj.weight": gate[order],
            f"experts.{expert_id}.up_proj.weight": up[order] * scale[:, None],
            f"experts.{expert_id}.down_proj.weight": down[:, order] / scale,
        }
    return block
