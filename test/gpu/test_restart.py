"""An MLP server that is stopped in order and started again under load: no client loses a token."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gpu_fleet
import gpu_report
import pytest
from compare import PROMPTS
from gpu_fleet import START_TIMEOUT_S, say, telling, wait_ready
from gpu_oracles import Key
from gpu_questions import forget_prefixes
from servers import Server, Zygote, wait_until
from streams import Stream, finish_all, start_streams

NUM_TOKENS = 600
STALL_TIMEOUT_S = 8.0  # and as long again for the server to come back
pytestmark = [pytest.mark.timeout(3 * START_TIMEOUT_S), pytest.mark.also_on_cpu]


@dataclass(frozen=True)
class Load:
    """Two attention servers under load; the second one gives a step up soon."""

    patient: Server
    hasty: Server
    port: int  # of the MLP server, which tests start
    start: tuple[Zygote, Path, str]
    flags: tuple[str, ...]
    running: list[Server]

    def start_mlp(self) -> Server:
        """Start the MLP server, not waited for; the fixture ends it."""
        self.running.extend(gpu_fleet.start_mlp(*self.start, [self.port], self.flags))
        return self.running[-1]

    @property
    def attn(self) -> list[Server]:
        """Both."""
        return [self.patient, self.hasty]

    def begin(self) -> list[Stream]:
        """Streams on both servers, in their middle."""
        forget_prefixes(self.attn)
        streams = start_streams([server.url for server in self.attn], PROMPTS, NUM_TOKENS)
        for stream in streams:
            stream.wait_for(5)
        return streams


@pytest.fixture(scope="module")
def load(zygote: Zygote, models: Mapping[Key, Path]) -> Iterator[Load]:
    """One MLP server, which is up."""
    start = (zygote, models["qwen3", "exact"], "exact")
    flags = gpu_fleet.exchange_flags("cuda_ipc")
    [port] = gpu_fleet.mlp_ports(1)
    short = ("--afd-stall-timeout", f"{STALL_TIMEOUT_S:g}")
    running: list[Server] = []
    load = Load(
        patient=gpu_fleet.start_attn(*start, port, flags, num_micro_batches=2),
        hasty=gpu_fleet.start_attn(*start, port, (*flags, *short)),
        port=port,
        start=start,
        flags=flags,
        running=running,
    )
    running += load.attn
    with telling(running):  # those that tests start are in the list as well
        load.start_mlp()
        for server in load.attn:
            wait_ready(server)
        say("servers under load: ready")
        yield load


@pytest.fixture(scope="module")
def expected(load: Load) -> list[list[int]]:
    """What clients get when nothing happens."""
    return finish_all(load.begin())


def _stop(server: Server) -> float:
    """In order; returns how long it took."""
    started_s = time.monotonic()
    server.signal(signal.SIGTERM)
    server.wait_ended(30)
    return time.monotonic() - started_s


def test_a_restart_costs_a_pause_and_not_a_token(load: Load, expected: list[list[int]]) -> None:
    streams = load.begin()
    num_before = max(len(stream.tokens) for stream in streams)

    stopped_s = _stop(load.running[-1])
    load.start_mlp()

    assert finish_all(streams) == expected
    assert num_before < NUM_TOKENS - 50  # it was under load
    gpu_report.record("orderly stop of the MLP server under load, s", round(stopped_s, 2))
    for server in load.attn:
        gaps = [stream.longest_gap_s() for stream in streams if server.url in stream.url]
        gpu_report.record(f"longest gap at {server.port}, s", round(max(gaps), 2))
        assert server.get("/afd/v1/status")[1]["num_failed_requests"] == 0


def test_steps_that_are_given_up_are_made_up_for_once_the_server_is_back(
    load: Load, expected: list[list[int]]
) -> None:
    streams = load.begin()
    before = load.hasty.get("/afd/v1/status")[1]["num_retracted_requests"]

    _stop(load.running[-1])
    wait_until(
        lambda: load.hasty.get("/afd/v1/status")[1]["num_retracted_requests"] > before,
        "the requests are retracted",
        5 * STALL_TIMEOUT_S,
    )
    load.start_mlp()

    assert finish_all(streams) == expected
    patient, hasty = (server.get("/afd/v1/status")[1] for server in load.attn)
    assert patient["num_retracted_requests"] == 0
    assert hasty["num_failed_requests"] == patient["num_failed_requests"] == 0
