"""The attention process: graphs of a step's exchanges, and the plain copies to compare with."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exchange.channel import Channel
from exchange.mlp_side import NUM_EXPERTS
from exchange.stamps import Stamps
from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.cuda_ipc.layout import FP8_GROUP, SlabShape, WaitPolicy
from sglang_afd.transport.cuda_ipc.slab import Slab

COLD_BYTES = 128 * 2**20  # between two uses of a buffer; L2 holds 50 to 60 MB
TOP_K = 8
MAX_RANKS = 1
MAX_ROWS = 1024
SLEEP_CYCLES = 2_000_000  # about a millisecond, in which both sides enqueue their graphs
# Of a value: e4m3 has three bits of mantissa, and a row is read back in bfloat16.
FP8_BOUND = 1 / 14

Inputs = tuple[Tensor, Tensor, Tensor]  # hidden states, ids, weights


@dataclass(frozen=True, kw_only=True)
class Case:
    """One size; one JSON line."""

    hidden_size: int
    rows: int
    dtype: str  # of dispatched rows: bf16 or fp8
    policy: WaitPolicy

    @property
    def shape(self) -> SlabShape:
        """Of the slots."""
        return SlabShape(
            num_slots=1,
            max_ranks=MAX_RANKS,
            max_rows=MAX_ROWS,
            hidden_size=self.hidden_size,
            top_k=TOP_K,
            dtype="bfloat16",
            is_fp8=self.dtype == "fp8",
        )

    @property
    def bytes_there(self) -> int:
        """Hidden states as they are sent, ids and weights."""
        shape = self.shape
        scales = shape.hidden_size // FP8_GROUP * 4 if shape.is_fp8 else 0
        return self.rows * (shape.request_row_bytes + scales + TOP_K * 8)

    @property
    def bytes_back(self) -> int:
        """Partial sums."""
        return self.rows * self.shape.row_bytes


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one exchange or copy, in microseconds."""

    median: float
    low: float
    high: float


class AttnSide:
    """Owns the slab and measures."""

    def __init__(self, channel: Channel, num_layers: int, num_steps: int) -> None:
        self._channel = channel
        self._num_layers = num_layers
        self._num_steps = num_steps
        self._epoch = 0
        self._slab: Slab | None = None
        self._slabs: dict[tuple[SlabShape, WaitPolicy], Slab] = {}

    def open(self, shape: SlabShape, policy: WaitPolicy) -> None:
        """Hand slots over to the MLP process, and exchange once."""
        key = (shape, policy)
        if key not in self._slabs:
            self._slabs[key] = Slab(shape, 0, policy)
        slab = self._slab = self._slabs[key]
        self._epoch += 1
        message = {"do": "open", "shape": dataclasses.asdict(shape), "epoch": self._epoch}
        self._channel.ask(message, slab.fds)
        slab.attach(self._epoch, 1)
        self._stage(1)
        slab.dispatch(0, 0, *_rows(shape, 1, 1)[0], rings=True)
        slab.combine(0, 1)
        torch.cuda.synchronize()

    def close(self) -> None:
        """Part with the MLP process."""
        assert self._slab is not None
        self._channel.ask({"do": "close"})
        self._slab.detach()

    def exchange(self, case: Case) -> Times:
        """A layer's dispatch and combine, inside graphs of all layers.

        Raises:
            AssertionError: What came back is not what was sent.
        """
        inputs = self._inputs(case)
        graphs, result = self._graphs(case, inputs)
        self._serve(case, len(graphs), has_stamps=False)
        times = self._time(case, graphs)
        self._end()
        last = (self._num_steps + len(graphs) - 1) % len(graphs)
        _check(result, inputs[(last + 1) * self._num_layers - 1][0], case)
        return times

    def one_ways(self, case: Case) -> tuple[float, float]:
        """Microseconds until the rows lie in the MLP process, and from there until the sum is here.

        Measured with the GPU's clock, read by kernels of one thread in between, in the last step.
        """
        before, after = Stamps(self._num_layers), Stamps(self._num_layers)
        graphs, _ = self._graphs(case, self._inputs(case), before, after)
        self._serve(case, len(graphs), has_stamps=True)
        self._time(case, graphs)
        arrived = self._end()
        there = [b - a for a, b in zip(before.read(), arrived, strict=True)]
        back = [b - a for a, b in zip(arrived, after.read(), strict=True)]
        return statistics.median(there) / 1000, statistics.median(back) / 1000

    def copy(self, case: Case) -> Times:
        """The same bytes there and back by plain copies, from sources as cold as the exchange's."""
        per_step = case.bytes_there * self._num_layers
        sets = max(1, -(-COLD_BYTES // per_step))
        sources = torch.ones(
            sets * self._num_layers, case.bytes_there, dtype=torch.uint8, device="cuda"
        )
        there = torch.empty(case.bytes_there, dtype=torch.uint8, device="cuda")
        staged = torch.ones(case.bytes_back, dtype=torch.uint8, device="cuda")
        back = torch.empty(case.bytes_back, dtype=torch.uint8, device="cuda")

        def step(number: int) -> Callable[[], None]:
            def copies() -> None:
                for layer in range(self._num_layers):
                    there.copy_(sources[number * self._num_layers + layer])
                    back.copy_(staged)

            return copies

        return self._time(None, [_graph_of(step(number)) for number in range(sets)])

    def _inputs(self, case: Case) -> list[Inputs]:
        """Of as many steps as are needed for none to find its rows in L2."""
        num_bytes = case.rows * case.hidden_size * 2
        # One row is for the flags alone, and no cache is too small for it.
        sets = 1 if case.rows == 1 else max(1, -(-COLD_BYTES // (num_bytes * self._num_layers)))
        return _rows(case.shape, case.rows, sets * self._num_layers)

    def _graphs(
        self,
        case: Case,
        inputs: Sequence[Inputs],
        before: Stamps | None = None,
        after: Stamps | None = None,
    ) -> tuple[list[torch.cuda.CUDAGraph], Tensor]:
        """One for each step, and where the last layer's sum lies, which is the same in all."""
        slab = self._slab
        assert slab is not None
        results: list[Tensor] = []

        def step(first: int) -> Callable[[], None]:
            def exchanges() -> None:
                for layer in range(self._num_layers):
                    if before is not None:
                        before.put(layer)
                    slab.dispatch(0, layer, *inputs[first + layer], rings=True)
                    results.append(slab.combine(0, case.rows))
                    if after is not None:
                        after.put(layer)

            return exchanges

        firsts = range(0, len(inputs), self._num_layers)
        return [_graph_of(step(first)) for first in firsts], results[-1]

    def _serve(self, case: Case, num_graphs: int, *, has_stamps: bool) -> None:
        num_steps = num_graphs + self._num_steps
        message = {"do": "serve", "num_rows": case.rows, "num_steps": num_steps}
        self._channel.ask(message | {"has_stamps": has_stamps})

    def _end(self) -> list[int]:
        answer, _ = self._channel.hear()
        if answer["error"]:
            raise AssertionError(f"the MLP process found: {answer['error']}")
        return list(answer["stamps"])

    def _stage(self, num_rows: int) -> None:
        assert self._slab is not None
        self._slab.stage_step(step=1, kind=Kind.DECODE, num_micro_batches=1, num_rows=num_rows)

    def _time(self, case: Case | None, graphs: Sequence[torch.cuda.CUDAGraph]) -> Times:
        """Each graph once, then steps of which each takes another's turn; per layer."""
        took: list[float] = []
        for number in range(len(graphs) + self._num_steps):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if case is not None:
                self._stage(case.rows)
            torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
            graphs[number % len(graphs)].replay()
            stop.record()
            stop.synchronize()
            if number >= len(graphs):
                took.append(start.elapsed_time(stop) * 1000 / self._num_layers)
        took.sort()
        tenth = len(took) // 10
        return Times(median=statistics.median(took), low=took[tenth], high=took[-1 - tenth])


def _rows(shape: SlabShape, num_rows: int, number: int) -> list[Inputs]:
    """Inputs of so many exchanges; hidden states apart, since they are what fills a cache."""
    generator = torch.Generator(device="cuda").manual_seed(num_rows)
    states = torch.randn(
        number,
        num_rows,
        shape.hidden_size,
        generator=generator,
        device="cuda",
        dtype=torch.bfloat16,
    )
    choices = (num_rows, shape.top_k)
    ids = torch.randint(
        0, NUM_EXPERTS, choices, dtype=torch.int32, generator=generator, device="cuda"
    )
    weights = torch.rand(choices, generator=generator, device="cuda")
    return [(state, ids, weights) for state in states]


def _graph_of(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return graph


def _check(got: Tensor, sent: Tensor, case: Case) -> None:
    torch.cuda.synchronize()
    if case.dtype == "bf16":
        is_right = torch.equal(got, sent)
    else:
        # Small values of a group lose more than their share: its scale is that of the largest.
        largest = sent.float().view(case.rows, -1, FP8_GROUP).abs().amax(2, keepdim=True)
        error = (got.float() - sent.float()).abs().view(case.rows, -1, FP8_GROUP)
        is_right = bool((error <= largest * FP8_BOUND).all())
    if not is_right:
        raise AssertionError(f"{case}: other rows came back than were sent")
