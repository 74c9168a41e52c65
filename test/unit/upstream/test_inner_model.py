from __future__ import annotations

import inspect
import pkgutil
from types import SimpleNamespace

import pytest
from torch import nn

from sglang_afd.errors import UpstreamMismatch
from sglang_afd.upstream import inner_model
from sglang_afd.upstream.moe import FusedMoE


class Experts(FusedMoE):
    """A MoE layer to those who ask for its class."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class Block(nn.Module):
    def __init__(self, *, has_experts: bool = True) -> None:
        super().__init__()
        self.alt_stream = object()
        self.experts = Experts() if has_experts else nn.Linear(1, 1)


class Decoder(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.layers.append(Block(has_experts=False))

    def forward(self, input_ids: object, positions: object, forward_batch: object) -> object:
        return None


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    def forward(self, input_ids: object, positions: object, forward_batch: object) -> object:
        return None


class WithImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language_model = Causal()

    def forward(self, input_ids: object, positions: object, forward_batch: object) -> object:
        return None


class Towers(Causal):
    """Experts in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Decoder()


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList([Block()])

    def forward(self, input_ids: object, positions: object, forward_batch: object) -> object:
        return None


def test_the_inner_model_is_the_one_with_the_layers() -> None:
    model = Causal()

    assert inner_model.find_inner_model(model) is model.model


def test_the_inner_model_of_a_wrapper_is_found_below_it() -> None:
    model = WithImages()

    assert inner_model.find_inner_model(model) is model.language_model.model


@pytest.mark.parametrize("model", [Towers(), Unusual()])
def test_a_model_without_one_inner_model_is_refused_with_the_remedy(model: nn.Module) -> None:
    with pytest.raises(UpstreamMismatch, match="has no inner model.*--afd-num-micro-batches 1"):
        inner_model.find_inner_model(model)


def test_only_blocks_with_experts_lose_their_second_stream() -> None:
    model = Causal()

    inner_model.keep_on_one_stream(model)

    streams = [layer.alt_stream for layer in model.model.layers]
    assert streams[:2] == [None, None]
    assert streams[2] is not None


def test_a_sequence_with_a_recurrent_state_is_not_cut() -> None:
    pool = inner_model.HybridReqToTokenPool.__new__(inner_model.HybridReqToTokenPool)

    assert not inner_model.may_cut_inside(SimpleNamespace(req_to_token_pool=pool))
    assert inner_model.may_cut_inside(SimpleNamespace(req_to_token_pool=object()))


@pytest.mark.parametrize(
    "name",
    ["sglang.srt.models.qwen3_moe.Qwen3MoeModel", "sglang.srt.models.qwen2_moe.Qwen2MoeModel"],
)
def test_the_tested_models_take_what_an_inner_model_is_known_by(name: str) -> None:
    parameters = inspect.signature(pkgutil.resolve_name(name).forward).parameters

    assert set(inner_model._INPUTS) < set(parameters)


@pytest.mark.parametrize(
    "name", ["qwen3_moe.Qwen3MoeSparseMoeBlock", "qwen2_moe.Qwen2MoeSparseMoeBlock"]
)
def test_the_tested_blocks_hold_their_experts_themselves(name: str) -> None:
    source = inspect.getsource(pkgutil.resolve_name(f"sglang.srt.models.{name}"))

    assert "self.experts = get_moe_impl_class(" in source


def test_the_second_stream_of_a_block_is_looked_up_by_this_name() -> None:
    block = pkgutil.resolve_name("sglang.srt.models.qwen2_moe.Qwen2MoeSparseMoeBlock")

    assert "self.alt_stream is not None" in inspect.getsource(block)


def test_an_attention_backend_is_built_for_a_runner_and_returned() -> None:
    build = inner_model.build_attention_backends

    assert list(inspect.signature(build).parameters) == ["model_runner"]
    assert "model_runner.attn_backend =" not in inspect.getsource(build)
    fields = set(inspect.signature(inner_model.ForwardContext).parameters)
    assert fields == {"attn_backend"}


def test_a_runner_has_what_is_read_of_it() -> None:
    source = inspect.getsource(inner_model.ModelRunner)

    assert "self.is_draft_worker =" in source
    assert "self.req_to_token_pool" in source
