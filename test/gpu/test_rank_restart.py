"""One of two MLP ranks that is stopped under load and started again: no client loses a token."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import gpu_fleet
import gpu_report
import pytest
from compare import PROMPTS
from gpu_ahead import Ahead, Setup, Stage
from gpu_fleet import START_TIMEOUT_S, say, telling, wait_ready
from gpu_questions import forget_prefixes
from servers import Server
from streams import Stream, finish_all, start_streams

from sglang_afd.ports import free_ports

NUM_TOKENS = 600


@dataclass(frozen=True)
class Pair:
    """An attention server in two micro-batches, and two ranks."""

    stage: Stage
    attn: Server
    ports: list[int]
    flags: tuple[str, ...]
    servers: list[Server]  # the ranks, the last one that was started last

    def start_mlp(self, only_rank: int | None = None) -> None:
        """Start both ranks or one of them, not waited for; the fixture ends them."""
        model = self.stage.models["qwen3", "exact"]
        start = (self.stage.zygote, model, "exact", self.ports, self.flags)
        self.servers.extend(gpu_fleet.start_mlp(*start, only_rank=only_rank))

    def begin(self) -> list[Stream]:
        """Streams in their middle."""
        forget_prefixes([self.attn])
        streams = start_streams([self.attn.url], PROMPTS, NUM_TOKENS)
        for stream in streams:
            stream.wait_for(5)
        return streams


def _start(stage: Stage) -> Pair:
    flags = gpu_fleet.exchange_flags("cuda_ipc")
    ports = free_ports(2)
    model = stage.models["qwen3", "exact"]
    attn = gpu_fleet.start_attn(stage.zygote, model, "exact", ports[0], flags, num_micro_batches=2)
    pair = Pair(stage, attn, ports, flags, [attn])
    pair.start_mlp()
    return pair


PAIR = Setup("two ranks under load", 3, _start)
pytestmark = [
    pytest.mark.timeout(3 * START_TIMEOUT_S),
    pytest.mark.also_on_cpu,
    pytest.mark.wants(PAIR),
]


@pytest.fixture(scope="module")
def pair(ahead: Ahead) -> Iterator[Pair]:
    """Attached."""
    pair = ahead.take(PAIR)
    with telling(pair.servers):  # those that tests start are in the list as well
        wait_ready(pair.attn)
        say("two ranks under load: ready")
        yield pair


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_rank_that_restarts_costs_a_pause_and_no_step_is_given_up(
    pair: Pair, number: signal.Signals
) -> None:
    expected = finish_all(pair.begin())
    streams = pair.begin()
    losses = pair.attn.get("/afd/v1/status")[1]["num_losses"]

    pair.servers[-1].signal_tree(number)
    pair.servers[-1].wait_ended(30)
    pair.start_mlp(only_rank=1)

    assert finish_all(streams) == expected
    status = pair.attn.get("/afd/v1/status")[1]
    assert status["num_losses"] > losses  # it was under load
    assert status["num_retracted_requests"] == status["num_failed_requests"] == 0
    said = [server.text() for server in pair.servers]
    assert not any("has rows for layer" in text for text in said)
    gap_s = max(stream.longest_gap_s() for stream in streams)
    gpu_report.record(f"longest gap while rank 1 restarts after {number.name}, s", round(gap_s, 2))
