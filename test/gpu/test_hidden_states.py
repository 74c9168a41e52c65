"""Hidden states that SGLang copies to the host while the next step runs are those of their step."""

from __future__ import annotations

import gpu_fleet
import gpu_report
import pytest
import torch
from compare import PROMPTS
from gpu_ahead import Ahead, Setup, Stage, Started
from gpu_fleet import START_TIMEOUT_S, telling, wait_ready
from gpu_questions import PATIENCE_S, at_once
from servers import fetch
from torch import Tensor

from sglang_afd.ports import free_ports

NUM_REQUESTS, NUM_TOKENS = 8, 64
BOUND = 1e-3  # of the largest value
FLAG = "--enable-return-hidden-states"


def _start(stage: Stage) -> Started:
    server = (stage.zygote, stage.models["qwen3", "exact"], "exact")
    flags = gpu_fleet.exchange_flags("cuda_ipc")
    ports = free_ports(1)
    [rank] = gpu_fleet.start_mlp(*server, ports, flags)
    return Started(
        {
            "mlp": rank,
            "attn": gpu_fleet.start_attn(*server, ports[0], (*flags, FLAG)),
            "stock": gpu_fleet.start_stock(*server, FLAG),
        }
    )


TELLING = Setup("servers that return hidden states", 3, _start)
pytestmark = [
    pytest.mark.timeout(2 * START_TIMEOUT_S),
    pytest.mark.also_on_cpu,
    pytest.mark.wants(TELLING),
]


def _generate(url: str, prompt: str, num_tokens: int) -> tuple[list[int], Tensor]:
    """The tokens, and the hidden states of every decode step."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"text": prompt, "sampling_params": sampling, "return_hidden_states": True}
    status, answer = fetch(f"{url}/generate", body, timeout_s=PATIENCE_S)
    assert status == 200, answer
    steps = answer["meta_info"]["hidden_states"][1:]  # the first ones are of the prompt
    return answer["output_ids"], torch.tensor(steps)


def _ask(url: str) -> list[tuple[list[int], Tensor]]:
    """Decode steps beside short prefills, which come between them."""

    def one(number: int) -> tuple[list[int], Tensor]:
        if number < NUM_REQUESTS:
            return _generate(url, PROMPTS[number], NUM_TOKENS)
        for turn in range(12):
            _generate(url, f"{PROMPTS[number]} {turn}", 2)
        return [], torch.empty(0)

    return at_once(one, NUM_REQUESTS + 2)[:NUM_REQUESTS]


def _apart(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max() / expected.abs().max())


def test_hidden_states_of_every_step_are_those_of_stock_sglang(ahead: Ahead) -> None:
    started = ahead.take(TELLING)
    with telling(started.servers):
        started["stock"].wait("/health", timeout_s=START_TIMEOUT_S)
        wait_ready(started["attn"])
        expected = _ask(started["stock"].url)

        got = _ask(started["attn"].url)

    apart = [_apart(want[1], have[1]) for want, have in zip(expected, got, strict=True)]
    gpu_report.record("hidden states apart, of the largest value", f"{max(apart):.2e}")
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert [states.shape[0] for _, states in got] == [NUM_TOKENS - 1] * NUM_REQUESTS
    assert max(apart) <= BOUND
    # Those of the step before, or of another request, would be noticed.
    assert all(_apart(states[1:], states[:-1]) > BOUND for _, states in expected)
    assert _apart(expected[0][1], got[1][1]) > BOUND
