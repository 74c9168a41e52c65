from __future__ import annotations

import types

import pytest
import torch

from sglang_afd.upstream import cpu_bodies


def test_the_gate_scales_the_shared_experts_output() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_states, shared, total = torch.randn(3, 3, 4, generator=generator)
    gate_weight = torch.randn(4, generator=generator)
    expected = total + torch.stack(
        [torch.sigmoid(h @ gate_weight) * s for h, s in zip(hidden_states, shared, strict=True)]
    )

    cpu_bodies.gated_add(hidden_states, gate_weight, shared, total)

    # Sums of numbers near 1 whose last bits the order decides; some of the sums are near 0.
    assert torch.allclose(total, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forbidden_tokens_get_no_chance(dtype: torch.dtype) -> None:
    mask = cpu_bodies.allocate_token_bitmask(40, 2)
    mask[1, 0] = 0b101  # the second row may say 0 or 2, or 32 and above
    logits = torch.ones(2, 40, dtype=dtype)

    cpu_bodies.apply_vocab_mask(logits, mask)

    assert logits[0].tolist() == [1.0] * 40
    assert (logits[1] == 1).nonzero().flatten().tolist() == [0, 2, *range(32, 40)]


def test_a_name_that_moved_is_an_error() -> None:
    module = types.ModuleType("sglang.kernels.ops.elementwise.elementwise")

    with pytest.raises(ImportError, match="has no fused_gate_sigmoid_mul_add"):
        cpu_bodies.put_in_place(module)
