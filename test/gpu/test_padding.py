"""Rows that only fill a graph's bucket never leave, and nothing beyond a step's rows is read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu_fleet
import gpu_report
import pytest
from compare import PROMPTS, differences, largest_distance
from gpu_ahead import Ahead, Setup, Stage
from gpu_fleet import START_TIMEOUT_S, metric, say, telling, wait_ready
from gpu_oracles import Oracles
from gpu_questions import LOGPROB_BOUND, Answers, ask_all
from servers import Server, wait_until
from streams import finish_all, start_streams

from sglang_afd.ports import free_ports

NUM_LAYERS = 4
NUM_TOKENS = 200
QUIET_S = 0.5  # without any row, after which the last step has ended


@dataclass(frozen=True)
class Watched:
    """An attention server that writes down what it ran, and the MLP rank that it shares."""

    server: Server
    rank: Server
    rows_file: Path

    def ran(self, name: str) -> int:
        """So far, without padding."""
        return int(json.loads(self.rows_file.read_text())[name])

    def num_rows(self) -> tuple[int, int]:
        """Rows that SGLang ran, and those that the MLP rank did, when both are at rest."""
        counts, since_s = (-1, -1), time.monotonic()

        def is_quiet() -> bool:
            nonlocal counts, since_s
            now = (self.ran("rows"), int(metric(self.rank, "rows_total")))
            if now != counts:
                counts, since_s = now, time.monotonic()
            return time.monotonic() - since_s > QUIET_S

        wait_until(is_quiet, "the end of every step", 30)
        return counts


@dataclass(frozen=True)
class Result:
    """What a watched server answered, and how many rows went through it meanwhile."""

    answers: Answers
    num_rows: int
    num_rows_sent: int  # over all layers


@dataclass(frozen=True)
class AllWatched:
    """Attention servers that share one MLP rank; one is asked at a time."""

    rank: Server
    by_name: Mapping[str, Watched]

    @property
    def servers(self) -> Sequence[Server]:
        """All of them."""
        return [self.rank, *(each.server for each in self.by_name.values())]


def _start(stage: Stage) -> AllWatched:
    server = (stage.zygote, stage.models["qwen3", "exact"], "exact")
    flags = gpu_fleet.exchange_flags("cuda_ipc")
    ports = free_ports(1)
    [rank] = gpu_fleet.start_mlp(*server, ports, flags, plant="poison_staging")
    kinds = {
        "poison 1": ("poison_slots", 1),
        "poison 2": ("poison_slots", 2),
        "forget": ("forget_a_row", 1),
        "send": ("send_a_padded_row", 1),
    }
    found = {}
    for name, (plant, number) in kinds.items():
        file = stage.directory / f"rows of {name}"
        attn = gpu_fleet.start_attn(
            *(*server, ports[0], flags),
            num_micro_batches=number,
            plant=plant,
            env={"TEST_ROWS": str(file)},
        )
        found[name] = Watched(attn, rank, file)
    return AllWatched(rank, found)


WATCHED = Setup("watched servers", 5, _start, stock=(("qwen3", "exact"),))
pytestmark = [pytest.mark.timeout(2 * START_TIMEOUT_S), pytest.mark.wants(WATCHED)]


@pytest.fixture(scope="module")
def watched(ahead: Ahead) -> Iterator[Mapping[str, Watched]]:
    """Each by its name."""
    started = ahead.take(WATCHED)
    with telling(started.servers):
        for each in started.by_name.values():
            wait_ready(each.server)
        say("watched servers: ready")
        yield started.by_name


def _ask(watched: Watched) -> Result:
    before = watched.num_rows()
    answers = ask_all([watched.server.url])
    after = watched.num_rows()
    return Result(answers, after[0] - before[0], after[1] - before[1])


@pytest.mark.parametrize("number", [1, 2])
def test_poison_beyond_a_steps_rows_changes_nothing(
    watched: Mapping[str, Watched], oracles: Oracles, number: int
) -> None:
    server = watched[f"poison {number}"]

    got = _ask(server)

    expected = oracles.answers("qwen3")
    apart = largest_distance(expected.all(), got.answers.all())
    gpu_report.record(f"logprobs apart with poison, {number} micro-batches", f"{apart:.2e}")
    assert differences(expected.all(), got.answers.all(), bound=LOGPROB_BOUND) == []
    assert got.num_rows_sent == got.num_rows * NUM_LAYERS
    assert server.ran("captured_steps") > 0


def test_steps_that_are_launched_ahead_count_their_own_rows(
    watched: Mapping[str, Watched],
) -> None:
    server = watched["poison 1"]
    before = server.num_rows()

    # Five and eight rows of one bucket in turns: SGLang launches a step while the last one runs.
    long = start_streams([server.server.url], PROMPTS[:5], NUM_TOKENS)
    while any(len(each.tokens) < NUM_TOKENS and each.error is None for each in long):
        finish_all(start_streams([server.server.url], PROMPTS[5:8], 3))
    finish_all(long)

    num_rows, num_rows_sent = (b - a for a, b in zip(before, server.num_rows(), strict=True))
    assert num_rows > 5 * NUM_TOKENS
    assert num_rows_sent == num_rows * NUM_LAYERS


def test_a_row_that_does_not_leave_would_be_noticed(
    watched: Mapping[str, Watched], oracles: Oracles
) -> None:
    got = _ask(watched["forget"])

    expected = oracles.answers("qwen3")
    assert differences(expected.crowd, got.answers.crowd, bound=LOGPROB_BOUND) != []


def test_a_padded_row_that_leaves_would_be_noticed(watched: Mapping[str, Watched]) -> None:
    got = _ask(watched["send"])

    assert got.num_rows_sent > got.num_rows * NUM_LAYERS
