"""SGLang's decode graphs, of each bucket once for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sglang_afd.upstream.attention import SplitAttention

__all__ = ["GRAPH_RUNNER_HOOK", "DecodeCudaGraphRunner", "StepGraphRunner", "StepGraphs"]

GRAPH_RUNNER_HOOK = (
    "sglang.srt.model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls"
)


class StepGraphs(Protocol):
    """What decides over the graphs."""

    def numbers(self, bucket: int) -> Sequence[int]:
        """Of micro-batches, for which a bucket of so many rows is captured; 1 first."""

    def choose(self, num_rows: int, bucket: int) -> int:
        """One of `numbers(bucket)` for a step of so many rows."""

    def attention(self, number: int) -> Sequence[AttentionBackend]:
        """The attention backend of each of `number` micro-batches, 2 or more."""

    def capturing(self, number: int) -> AbstractContextManager[None]:
        """Around the forwards that capture one graph."""

    def replaying(self, num_rows: int, number: int, bucket: int) -> AbstractContextManager[None]:
        """Around a replay, on the stream on which it runs."""


class StepGraphRunner(DecodeCudaGraphRunner):
    """With one micro-batch everything is SGLang's own."""

    def __init__(self, graphs: StepGraphs, model_runner: ModelRunner) -> None:
        self._graphs = graphs
        self._number = 1  # of micro-batches of the graph that is captured or replayed next
        self._attention: dict[int, AttentionBackend] = {}
        super().__init__(model_runner)

    def capture(self) -> None:
        """SGLang's; before it, attention for each number of micro-batches gets its buffers."""
        self._attention = {1: self.attn_backend}
        sizes: dict[int, int] = {}
        for bucket in self.capture_bs:
            for number in self._graphs.numbers(bucket):
                sizes[number] = max(sizes.get(number, 0), bucket // number)
        for number, most_rows in sizes.items():
            if number > 1:
                attention = SplitAttention(self._graphs.attention(number))
                attention.init_cuda_graph_state(most_rows, most_rows)
                self._attention[number] = attention
        super().capture()

    def capture_one_shape(
        self,
        size: int,
        forward: Any,
        stream_idx: int | None = None,
        variant_label: str | None = None,
    ) -> None:
        """SGLang's, once for each number of micro-batches."""
        for number in self._graphs.numbers(size):
            self._use(number)
            with self._graphs.capturing(number):
                super().capture_one_shape(size, forward, stream_idx, _label(number))
        self._use(1)

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        """SGLang's: the graph of one micro-batch is there whenever another one is."""
        self._use(1)
        return bool(super().can_run_graph(forward_batch))

    def execute(self, forward_batch: ForwardBatch, pp_proxy_tensors: Any = None) -> Any:
        """SGLang's, with the graph of the chosen number."""
        num_rows = forward_batch.batch_size
        bucket = self._pad_to_bucket(num_rows, self.capture_bs)
        number = self._graphs.choose(num_rows, bucket)
        self._use(number)
        with self._graphs.replaying(num_rows, number, bucket):
            return super().execute(forward_batch, pp_proxy_tensors)

    def _use(self, number: int) -> None:
        self._number = number
        self.attn_backend = self._attention[number]

    def _resolve_lora_variant(self, forward_batch: ForwardBatch) -> str | None:
        # Part of the key under which a graph is kept; there is no LoRA with split roles.
        return _label(self._number)


def _label(number: int) -> str | None:
    return None if number == 1 else f"{number} micro-batches"
