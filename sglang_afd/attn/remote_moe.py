"""`RemoteFusedMoE`: SGLang's MoE layer without weights; it sends rows and waits for their sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_afd.attn import micro_batch as micro_batches
from sglang_afd.attn import runtime
from sglang_afd.attn.micro_batch import MicroBatch
from sglang_afd.transport.base import Rows
from sglang_afd.upstream.moe import (
    BaseDispatcher,
    DispatchOutputFormat,
    FusedMoE,
    FusedMoEMethodBase,
    QuantizationConfig,
    TopKOutput,
    TopKOutputChecker,
)


class Dispatched(NamedTuple):
    """A dispatch that has begun; the pieces after the first have not been sent yet."""

    hidden_states: Tensor  # [T, H], as given
    micro_batch: MicroBatch
    pieces: Sequence[Rows]  # at most max_rows rows each; none without rows

    @property
    def format(self) -> DispatchOutputFormat:
        """SGLang reads it; ours carries what the standard one does."""
        return DispatchOutputFormat.STANDARD


class RemoteDispatcher(BaseDispatcher):
    """Sends one layer's rows to every MLP rank and adds what comes back."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self._layer_id = layer_id

    def dispatch(self, hidden_states: Tensor, topk_output: TopKOutput) -> Dispatched:
        """Start moving rows; returns without waiting for the MLP servers.

        Args:
            hidden_states: [T, H] in the model's dtype.
            topk_output: In SGLang's standard format: ids and weights, [T, K] each.

        Raises:
            PeerLost: No MLP servers are attached.
        """
        if not TopKOutputChecker.format_is_standard(topk_output):
            raise AssertionError(f"top-k came as {topk_output.format}, expected STANDARD")
        micro_batch = micro_batches.current(hidden_states.shape[0])
        if hidden_states.shape[0] == 0:
            return Dispatched(hidden_states, micro_batch, ())
        rows = Rows(
            hidden_states=hidden_states.contiguous(),
            topk_ids=topk_output.topk_ids.to(torch.int32).contiguous(),
            topk_weights=topk_output.topk_weights.to(torch.float32).contiguous(),
        )
        exchange = runtime.current().exchange
        pieces = _cut(rows, exchange.max_rows)
        exchange.send(
            self._layer_id, micro_batch, pieces[0], first_row=0, is_whole=len(pieces) == 1
        )
        return Dispatched(hidden_states, micro_batch, pieces)

    def combine(self, combine_input: Dispatched) -> Tensor:
        """Wait for the sums: [T, H]; zero rows exchange nothing.

        Raises:
            PeerLost: An MLP server went away, or did not reply in time.
        """
        hidden_states, micro_batch, pieces = combine_input
        if not pieces:
            return torch.empty_like(hidden_states)
        exchange, is_whole = runtime.current().exchange, len(pieces) == 1
        sums: list[Tensor] = []
        first_row = 0
        for piece in pieces:
            if sums:  # the first one was sent by `dispatch`
                exchange.send(
                    self._layer_id, micro_batch, piece, first_row=first_row, is_whole=is_whole
                )
            num_rows = piece.hidden_states.shape[0]
            sums.append(exchange.receive(micro_batch, num_rows, is_whole=is_whole))
            first_row += num_rows
        return (sums[0] if is_whole else torch.cat(sums)).to(hidden_states.device)


class RemoteFusedMoE(FusedMoE):
    """What SGLang's models get in place of `FusedMoE`; it has no parameters."""

    def __init__(
        self, *args: Any, quant_config: QuantizationConfig | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, quant_config=_WeightlessConfig(quant_config), **kwargs)
        self.dispatcher = RemoteDispatcher(self.layer_id)

    def forward(
        self, hidden_states: Tensor, topk_output: TopKOutput, pre_quant_input: object = None
    ) -> Tensor:
        """[T, H] to [T, H]; nothing of SGLang's is held while others run and while it waits."""
        dispatched = self.dispatcher.dispatch(hidden_states, topk_output)
        micro_batches.let_others_run()
        return self.dispatcher.combine(dispatched)


class _WeightlessMethod(FusedMoEMethodBase):
    """A quantisation method that allocates nothing and computes nothing."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        return None

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: object) -> None:
        self.moe_runner_config = moe_runner_config

    def apply(self, layer: torch.nn.Module, dispatch_output: Dispatched) -> Dispatched:
        return dispatch_output


class _WeightlessConfig(QuantizationConfig):
    """Makes `FusedMoE` choose `_WeightlessMethod`, under the name of the model's own format."""

    def __init__(self, base: QuantizationConfig | None) -> None:
        super().__init__()
        self._base = base

    def get_name(self) -> str:
        return self._base.get_name() if self._base is not None else "none"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> _WeightlessMethod:
        return _WeightlessMethod()

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return []

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _WeightlessConfig:
        return cls(None)

    def get_scaled_act_names(self) -> list[str]:
        return []


def _cut(rows: Rows, max_rows: int) -> list[Rows]:
    num_rows = rows.hidden_states.shape[0]
    if num_rows <= max_rows:
        return [rows]
    return [
        Rows(
            hidden_states=rows.hidden_states[start : start + max_rows],
            topk_ids=rows.topk_ids[start : start + max_rows],
            topk_weights=rows.topk_weights[start : start + max_rows],
        )
        for start in range(0, num_rows, max_rows)
    ]
