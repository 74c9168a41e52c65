from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_afd.attn.split_forward import SplitForward, _arguments_of, merge
from sglang_afd.errors import UpstreamMismatch
from sglang_afd.rounds.splitting import split
from sglang_afd.upstream.forward_batch import CaptureHiddenMode

FIRST, SECOND = torch.arange(6.0).reshape(3, 2), torch.arange(4.0).reshape(2, 2)
WHOLE = torch.cat([FIRST, SECOND])


def test_hidden_states_are_put_together_in_order() -> None:
    assert torch.equal(merge([FIRST, SECOND]), WHOLE)


@pytest.mark.parametrize("kind", [list, tuple])
def test_auxiliary_hidden_states_are_put_together_layer_by_layer(kind: Any) -> None:
    def result(rows: Tensor) -> tuple[Tensor, Any]:
        return rows, kind([rows + 1, rows + 2])

    hidden_states, auxiliary = merge([result(FIRST), result(SECOND)])

    assert torch.equal(hidden_states, WHOLE)
    assert isinstance(auxiliary, kind)
    assert torch.equal(auxiliary[0], WHOLE + 1)
    assert torch.equal(auxiliary[1], WHOLE + 2)


def test_a_missing_residual_stays_missing() -> None:
    hidden_states, residual = merge([(FIRST, None), (SECOND, None)])

    assert torch.equal(hidden_states, WHOLE)
    assert residual is None


def test_a_result_that_cannot_be_put_together_is_refused() -> None:
    with pytest.raises(UpstreamMismatch, match="returned SimpleNamespace"):
        merge([SimpleNamespace(), SimpleNamespace()])


def test_results_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        merge([(FIRST, [FIRST]), (SECOND, [])])


def test_arguments_with_an_entry_a_row_are_cut() -> None:
    rows = [5]
    _, second = split(rows, 2)
    arguments = {
        "self": torch.nn.Module(),
        "input_ids": torch.arange(5),
        "positions": torch.arange(15).reshape(3, 5),
        "forward_batch": "whole",
        "input_embeds": WHOLE,
        "pp_proxy_tensors": None,
    }

    own = _arguments_of(arguments, "child", second)

    assert own["forward_batch"] == "child"
    assert torch.equal(own["input_ids"], torch.tensor([2, 3, 4]))
    assert torch.equal(own["positions"], torch.arange(15).reshape(3, 5)[:, 2:])
    assert torch.equal(own["input_embeds"], WHOLE[2:])
    assert own["pp_proxy_tensors"] is None


def test_an_argument_that_cannot_be_cut_is_refused_by_name() -> None:
    arguments = {"forward_batch": "whole", "deepstack": torch.zeros(5)}

    with pytest.raises(UpstreamMismatch, match="deepstack=Tensor.*--afd-num-micro-batches 1"):
        _arguments_of(arguments, "child", split([5], 2)[0])


class Inner(torch.nn.Module):
    """Returns memory that it uses again, as a slot is."""

    def __init__(self) -> None:
        super().__init__()
        self.slot = FIRST.clone()

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        return self.slot


@pytest.mark.parametrize("mode", [CaptureHiddenMode.LAST, CaptureHiddenMode.FULL])
def test_hidden_states_that_clients_get_do_not_stay_in_a_slot(mode: CaptureHiddenMode) -> None:
    inner = Inner()

    kept = _capture(inner, mode)

    inner.slot.zero_()
    assert torch.equal(kept, FIRST)


def test_hidden_states_that_nobody_gets_are_not_copied() -> None:
    inner = Inner()

    assert _capture(inner, CaptureHiddenMode.NULL) is inner.slot


def _capture(inner: Inner, mode: CaptureHiddenMode) -> Tensor:
    """A step in one micro-batch as it is captured."""
    nobody: Any = None
    graphs: Any = SimpleNamespace(captured_number=1)
    hook = SplitForward(nobody, nobody, inner, nobody, graphs)
    batch = SimpleNamespace(capture_hidden_mode=mode)
    result: Tensor = hook(Inner.forward, inner, torch.arange(3), torch.arange(3), batch)
    return result
