"""The step benchmark's weights, and its import without CUDA."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from step import uninitialised, weights

HIDDEN, INNER = 256, 128


class Layer(nn.Module):
    """The parameters of a `FusedMoE` as one rank has them."""

    def __init__(self, rank: int, num_local: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_id, self.moe_ep_rank, self.num_local_experts = 3, rank, num_local
        shape = (num_local, 2 * INNER, HIDDEN)
        self.w13_weight = _parameter(torch.empty(shape, dtype=dtype))
        self.w13_weight_scale_inv = _parameter(
            torch.empty(num_local, 2 * INNER // 128, HIDDEN // 128)
        )


def _parameter(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


def _filled(rank: int, num_local: int, dtype: torch.dtype = torch.float32) -> Layer:
    layer = Layer(rank, num_local, dtype)
    weights.fill_experts(layer)
    return layer


def test_a_rank_has_the_experts_that_the_whole_layer_has_at_its_place() -> None:
    whole, second = _filled(0, 4), _filled(1, 2)

    assert torch.equal(whole.w13_weight[2:], second.w13_weight)
    assert not torch.equal(whole.w13_weight[:2], second.w13_weight)


def test_experts_of_a_layer_differ_from_each_other() -> None:
    layer = _filled(0, 3)

    assert not torch.equal(layer.w13_weight[0], layer.w13_weight[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_matrix_has_a_variance_of_one_over_its_inputs(dtype: torch.dtype) -> None:
    layer = _filled(0, 2, dtype)

    raw = layer.w13_weight.float()
    scale = layer.w13_weight_scale_inv.repeat_interleave(128, 1).repeat_interleave(128, 2)
    values = raw * scale if dtype == torch.float8_e4m3fn else raw
    assert values.var().item() * HIDDEN == pytest.approx(1.0, rel=0.05)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a child would have answered."""
    told = {"get_device_capability": [9, 0], "get_device_properties": {"name": "a GPU"}}
    monkeypatch.setattr(forked, "ask_in_a_child", lambda question: dict(told))
    return told


def test_an_import_is_answered_without_cuda_and_later_calls_are_not(
    answers: dict[str, Any],
) -> None:
    original = torch.cuda.get_device_capability

    with uninitialised.asked_elsewhere():
        kept = torch.cuda.get_device_capability
        inside = kept()
        properties = torch.cuda.get_device_properties(0)

    assert inside == (9, 0)
    assert properties.name == "a GPU"
    assert torch.cuda.get_device_capability is original
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            kept()  # asks CUDA, as the original does
