"""Which graphs are captured and replayed, and what a replay is told, without a GPU.

SGLang's own runner does the work in `DecodeCudaGraphRunner`; what it would capture is noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_afd.attn.step_graphs import StepGraphs
from sglang_afd.errors import ConfigError
from sglang_afd.protocol.messages import Kind
from sglang_afd.rounds.choice import build_choice
from sglang_afd.upstream.graph_runner import DecodeCudaGraphRunner, StepGraphRunner

MAX_ROWS = 64


class Runtime:
    """What the graphs need of one; notes what is staged, and is its own exchange and timer."""

    def __init__(self, setting: str) -> None:
        self.config = SimpleNamespace(num_micro_batches=setting)
        self.choice: Any = build_choice("1" if setting == "auto" else setting)
        self.max_rows = MAX_ROWS
        self.num_micro_batches = 0
        self.staged: list[tuple[Any, ...]] = []
        self.exchange = self.timer = self

    def stage(self, kind: Kind, *, number: int, num_rows: int, most_rows: int) -> None:
        self.staged.append((kind, number, num_rows, most_rows))

    @contextmanager
    def time(self, num_rows: int, number: int, *, is_prefill: bool) -> Iterator[None]:
        assert self.staged, "staged first"
        yield


class Backend:
    """An attention backend that notes the size of its buffers."""

    def __init__(self) -> None:
        self.size = 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        assert max_bs == max_num_tokens
        self.size = max_bs


class Backends:
    def __init__(self) -> None:
        self.parts = [Backend() for _ in range(4)]

    def first(self, number: int) -> list[Backend]:
        return self.parts[:number]


def graphs_of(setting: str) -> tuple[StepGraphs, Runtime, Backends]:
    runtime: Any = Runtime(setting)
    backends: Any = Backends()
    return StepGraphs(runtime, backends), runtime, backends


@pytest.mark.parametrize(
    ("setting", "bucket", "numbers"),
    [
        ("1", 8, (1,)),
        ("2", 8, (1, 2)),
        ("2", 1, (1,)),
        ("2", 7, (1,)),
        ("3", 8, (1,)),
        ("3", 12, (1, 3)),
        ("4", 12, (1, 4)),
        ("auto", 12, (1, 2)),
    ],
)
def test_a_bucket_is_captured_whole_and_in_even_shares(
    setting: str, bucket: int, numbers: tuple[int, ...]
) -> None:
    graphs, _, _ = graphs_of(setting)

    assert tuple(graphs.numbers(bucket)) == numbers


def test_a_bucket_that_would_go_in_pieces_is_refused() -> None:
    graphs, _, _ = graphs_of("2")

    with pytest.raises(ConfigError, match="graph of 72 rows does not fit --afd-max-rows 64"):
        graphs.numbers(72)


@pytest.mark.parametrize(
    ("num_rows", "bucket", "number"),
    [
        (64, 64, 2),
        (40, 64, 2),  # 32 and 8
        (39, 64, 1),  # 32 and 7, less than a quarter
        (32, 64, 1),
        (2, 2, 2),
        (1, 2, 1),
        (7, 7, 1),  # not captured
    ],
)
def test_a_step_is_cut_where_every_part_has_a_fair_share_of_real_rows(
    num_rows: int, bucket: int, number: int
) -> None:
    graphs, _, _ = graphs_of("2")

    assert graphs.choose(num_rows, bucket) == number


@pytest.mark.parametrize(
    ("num_rows", "bucket", "number", "most_rows"), [(5, 8, 1, 5), (7, 8, 2, 4), (3, 8, 1, 3)]
)
def test_a_replay_is_told_its_real_rows(
    num_rows: int, bucket: int, number: int, most_rows: int
) -> None:
    graphs, runtime, _ = graphs_of("2")

    with graphs.replaying(num_rows, number, bucket):
        assert runtime.num_micro_batches == number

    assert runtime.staged == [(Kind.DECODE, number, num_rows, most_rows)]


class Batch:
    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Attention backends by graph key, as SGLang's runner would use them; also of replays."""
    graphs: dict[Any, Any] = {}

    def init(self: Any, model_runner: Any) -> None:
        self.capture_bs, self.attn_backend = [1, 2, 6, 8], model_runner.attn_backend
        self.capture()

    def capture(self: Any) -> None:
        for bucket in reversed(self.capture_bs):
            self.capture_one_shape(bucket, None)

    def capture_one_shape(
        self: Any, size: int, forward: Any, stream_idx: Any = None, label: Any = None
    ) -> None:
        graphs[self._make_graph_key(size, stream_idx, label)] = (
            self.attn_backend,
            self._graphs.captured_number,
        )

    def execute(self: Any, batch: Batch, pp_proxy_tensors: Any = None) -> Any:
        bucket = self._pad_to_bucket(batch.batch_size, self.capture_bs)
        key = self._make_graph_key(bucket, None, self._resolve_lora_variant(batch))
        return graphs[key], self.attn_backend

    for function in (capture, capture_one_shape, execute):
        monkeypatch.setattr(DecodeCudaGraphRunner, function.__name__, function)
    monkeypatch.setattr(DecodeCudaGraphRunner, "__init__", init)
    return graphs


def test_each_bucket_is_captured_once_for_each_number_with_attention_of_its_own(
    captured: dict[Any, Any],
) -> None:
    graphs, _, backends = graphs_of("2")
    primary: Any = object()

    runner = StepGraphRunner(graphs, SimpleNamespace(attn_backend=primary))

    assert sorted((key.size, number) for key, (_, number) in captured.items()) == [
        (1, 1),
        *((size, number) for size in (2, 6, 8) for number in (1, 2)),
    ]
    assert all((attention is primary) == (number == 1) for attention, number in captured.values())
    assert [part.size for part in backends.parts] == [4, 4, 0, 0]
    assert graphs.captured_number is None
    assert runner.attn_backend is primary


def test_a_replay_uses_the_graph_and_the_attention_of_the_chosen_number(
    captured: dict[Any, Any],
) -> None:
    graphs, runtime, _ = graphs_of("2")
    runner = StepGraphRunner(graphs, SimpleNamespace(attn_backend=object()))

    for num_rows, number in ((8, 2), (3, 1), (6, 2), (1, 1)):
        batch: Any = Batch(num_rows)
        (attention, captured_number), replayed = runner.execute(batch)

        assert captured_number == number
        assert attention is replayed
        assert runtime.num_micro_batches == number


def test_whether_a_graph_can_run_is_asked_of_one_micro_batch(
    captured: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, _, _ = graphs_of("2")
    runner = StepGraphRunner(graphs, SimpleNamespace(attn_backend=object()))
    batch: Any = Batch(8)
    runner.execute(batch)
    monkeypatch.setattr(
        DecodeCudaGraphRunner,
        "can_run_graph",
        lambda self, batch: self._make_graph_key(7, None, self._resolve_lora_variant(batch)),
    )

    assert runner.can_run_graph(batch) is True
    assert runner._resolve_lora_variant(batch) is None
