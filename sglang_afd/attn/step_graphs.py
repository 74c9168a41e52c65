"""Which CUDA graphs a decode step may replay, and what is said of it before it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sglang_afd.attn.runtime import Runtime
from sglang_afd.config import AUTO_GRAPH_SLOTS
from sglang_afd.errors import ConfigError
from sglang_afd.protocol.messages import Kind
from sglang_afd.rounds.splitting import SMALLEST_SHARE
from sglang_afd.upstream.attention import AttentionBackend
from sglang_afd.upstream.inner_model import MicroBatchBackends


class StepGraphs:
    """See `upstream.graph_runner.StepGraphs`.

    Args:
        runtime: Of this process.
        backends: Attention of each micro-batch, the same as in eager steps.
    """

    def __init__(self, runtime: Runtime, backends: MicroBatchBackends) -> None:
        self._runtime = runtime
        self._backends = backends
        self.captured_number: int | None = None  # of micro-batches, while a graph is captured

    def numbers(self, bucket: int) -> Sequence[int]:
        """One micro-batch always, and as many as the flag allows where that is an even share.

        Raises:
            ConfigError: A bucket that would have to go in pieces.
        """
        if bucket > self._runtime.exchange.max_rows:
            raise ConfigError(
                f"a CUDA graph of {bucket} rows does not fit --afd-max-rows "
                f"{self._runtime.exchange.max_rows}; raise it on both roles, or lower "
                f"--cuda-graph-max-bs-decode"
            )
        setting = self._runtime.config.num_micro_batches
        number = AUTO_GRAPH_SLOTS if setting == "auto" else int(setting)
        return (1, number) if number > 1 and bucket % number == 0 else (1,)

    def choose(self, num_rows: int, bucket: int) -> int:
        """What the measurements say, unless a part would be padding for the most part.

        Parts are even shares of the bucket, so the real rows of the last one are what is left.
        """
        number = self._runtime.choice.choose(num_rows, is_prefill=False)
        if number == 1 or number not in self.numbers(bucket):
            return 1
        share = bucket // number
        in_last = num_rows - share * (number - 1)
        return number if in_last >= max(1, SMALLEST_SHARE * share) else 1

    def attention(self, number: int) -> Sequence[AttentionBackend]:
        """See `upstream.graph_runner.StepGraphs`."""
        return self._backends.first(number)

    @contextmanager
    def capturing(self, number: int) -> Iterator[None]:
        """See `upstream.graph_runner.StepGraphs`."""
        self.captured_number = number
        try:
            yield
        finally:
            self.captured_number = None

    @contextmanager
    def replaying(self, num_rows: int, number: int, bucket: int) -> Iterator[None]:
        """See `upstream.graph_runner.StepGraphs`."""
        here = self._runtime
        here.num_micro_batches = number
        here.exchange.stage(
            Kind.DECODE,
            number=number,
            num_rows=num_rows,
            most_rows=min(num_rows, bucket // number),
        )
        with here.timer.time(num_rows, number, is_prefill=False):
            yield
