"""Faults that are planted on purpose are noticed by what the covering set compares."""

from __future__ import annotations

from collections.abc import Iterator

import checkpoints
import fleet
import gpu_fleet
import pytest
from compare import differences
from gpu_ahead import Ahead, Setup, Stage, Started
from gpu_fleet import START_TIMEOUT_S, say, telling, wait_ready
from gpu_oracles import Oracles
from gpu_questions import (
    AT_90_PERCENT,
    LOGPROB_BOUND,
    MEAN,
    ask_crowd,
    continue_texts,
    distance,
)

from sglang_afd.ports import free_ports


def _start(stage: Stage) -> Started:
    zygote = stage.zygote
    model, fast = stage.models["qwen3", "exact"], stage.models["qwen3", "fast"]
    swapped = checkpoints.swap_experts(model, stage.directory / "swapped", 1, 3, 9)
    flags = gpu_fleet.exchange_flags("cuda_ipc")
    ports = free_ports(4)
    exact, zeros, others = (zygote, model, "exact"), (zygote, fast, "fast"), (zygote, swapped)
    claimed = {"TEST_CLAIMED_FINGERPRINT": fleet.fingerprint_of(model)}
    mlp = [
        *gpu_fleet.start_mlp(*exact, ports[:1], flags),
        *gpu_fleet.start_mlp(*zeros, ports[1:3], flags, plant="drop_partial_sum"),
        *gpu_fleet.start_mlp(
            *others, "exact", ports[3:], flags, plant="other_weights", env=claimed
        ),
    ]
    attn = {
        "micro-batches swapped": gpu_fleet.start_attn(
            *exact, ports[0], flags, num_micro_batches=2, plant="swap_micro_batches"
        ),
        "a partial sum dropped": gpu_fleet.start_attn(*zeros, ports[1], flags),
        "two experts exchanged": gpu_fleet.start_attn(*exact, ports[3], flags),
    }
    return Started({**{f"MLP {number}": server for number, server in enumerate(mlp)}, **attn})


FAULTY = Setup("faulty servers", 7, _start, stock=(("qwen3", "exact"), ("qwen3", "fast")))
FAULTS = ("micro-batches swapped", "a partial sum dropped", "two experts exchanged")
pytestmark = [
    pytest.mark.timeout(2 * START_TIMEOUT_S),
    pytest.mark.also_on_cpu,
    pytest.mark.wants(FAULTY),
]


@pytest.fixture(scope="module")
def faulty(ahead: Ahead) -> Iterator[Started]:
    """An attention server for each fault."""
    started = ahead.take(FAULTY)
    with telling(started.servers):
        for fault in FAULTS:
            wait_ready(started[fault])
        say("faulty servers: ready")
        yield started


@pytest.mark.parametrize("fault", ["micro-batches swapped", "two experts exchanged"])
def test_other_tokens_would_be_noticed(faulty: Started, oracles: Oracles, fault: str) -> None:
    answers = ask_crowd([faulty[fault].url])

    assert differences(oracles.answers("qwen3").crowd, answers, bound=LOGPROB_BOUND) != []


def test_a_partial_sum_that_is_dropped_would_be_noticed_in_bfloat16(
    faulty: Started, oracles: Oracles
) -> None:
    words = oracles.words("qwen3")

    got = continue_texts([faulty["a partial sum dropped"].url], words.texts)

    found = distance(words.continuations, got)
    assert found.at_90_percent > AT_90_PERCENT
    assert found.mean > MEAN
