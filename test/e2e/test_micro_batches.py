"""A step that is cut into micro-batches answers what stock SGLang answers, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fleet
import micro_batch_faults
import pytest
import torch
from compare import NUM_TOKENS, PROMPTS, Answer, ask_at_once, ask_one_by_one, differences
from fleet import Oracle
from servers import Server, Zygote, fetch, running, wait_until
from torch import Tensor

from sglang_afd.ports import free_ports

FEW = PROMPTS[:2]
SHORT = tuple(prompt for prompt in PROMPTS if len(prompt.split()) < 10)[:5]  # in one prefill
LONG = PROMPTS[5]  # rows enough to be cut inside
HIDDEN_STATES = ("--enable-return-hidden-states",)
HIDDEN_STATES_BOUND = 1e-4  # of the largest; fp32, other batch shapes


@dataclass(frozen=True)
class HiddenStates:
    """What a server returns of its hidden states: [rows, auxiliary layers * H] of each request."""

    of_prompt: list[Tensor]
    of_tokens: list[Tensor]


@dataclass(frozen=True)
class Watched:
    """An attention server whose micro-batches are watched."""

    setting: str
    server: Server
    directory: Path

    def status(self) -> Any:
        return self.server.get("/afd/v1/status")[1]

    def seen(self) -> set[str]:
        return micro_batch_faults.seen(self.directory)

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Whatever comes of the test that plants it, the next one finds the server whole."""
        self._set_fault(name)
        try:
            yield
        finally:
            self._set_fault("")

    def _set_fault(self, name: str) -> None:
        (self.directory / "fault").write_text(name)
        fleet.forget_prefixes(self.server)  # it may not hide behind cached prefixes


@dataclass(frozen=True)
class Asked:
    """What an attention server answered."""

    one_by_one: list[Answer]
    at_once: list[Answer]
    again: list[Answer]  # with radix-cache hits
    few: list[Answer]  # fewer rows than micro-batches, for three and four
    mixed: list[tuple[int, ...]]  # tokens; prefill and decode in one batch where that is allowed


@pytest.fixture(scope="module")
def mlp(zygote: Zygote, qwen3_oracle: Oracle) -> Iterator[Server]:
    """One MLP rank for all attention servers of this file."""
    [rank] = fleet.start_mlp(zygote, qwen3_oracle.model, free_ports(1))
    with running([rank]):
        rank.wait("/health")
        yield rank


@pytest.fixture(scope="module")
def stock_hidden_states(zygote: Zygote, qwen3_oracle: Oracle) -> HiddenStates:
    """Of stock SGLang, with auxiliary hidden states."""
    server = fleet.stock_server(
        zygote, qwen3_oracle.model, *HIDDEN_STATES, plant="capture_hidden_states"
    )
    with running([server]):
        return ask_hidden_states(server)


def settings(*names: str) -> pytest.MarkDecorator:
    """The attention servers that a test asks, by the value of the flag."""
    values = [pytest.param(name, marks=pytest.mark.slow) if name == "3" else name for name in names]
    return pytest.mark.parametrize("watched", values, indirect=True, scope="module")


EVERY = settings("1", "2", "3", "4", "auto")


@pytest.fixture(scope="module")
def watched(
    request: pytest.FixtureRequest,
    zygote: Zygote,
    qwen3_oracle: Oracle,
    mlp: Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    """One attention server for each value of the flag."""
    directory = tmp_path_factory.mktemp("micro-batches")
    server = fleet.start_attn(
        zygote,
        qwen3_oracle.model,
        mlp.port,
        *("--afd-num-micro-batches", request.param),
        *(HIDDEN_STATES if request.param in "123" else ()),
        *(("--enable-mixed-chunk",) if request.param in ("4", "auto") else ()),
        plant="watch_micro_batches" if request.param in "123" else "note_micro_batches",
        env={"TEST_MICRO_BATCHES": str(directory)},
    )
    with running([server]):
        fleet.wait_ready(server)
        yield Watched(request.param, server, directory)


@pytest.fixture(scope="module")
def asked(watched: Watched) -> Asked:
    """The answers of an attention server."""
    url = watched.server.url
    one_by_one = ask_one_by_one(url)
    at_once, again = ask_at_once([url]), ask_at_once([url])
    few = ask_at_once([url], FEW)
    fleet.forget_prefixes(watched.server)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        mixed = list(pool.map(ask_tokens, [url] * len(PROMPTS), PROMPTS))
    return Asked(one_by_one=one_by_one, at_once=at_once, again=again, few=few, mixed=mixed)


def ask_tokens(url: str, prompt: str) -> tuple[int, ...]:
    """Without logprobs, which SGLang does not give for batches of prefill and decode."""
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
    }
    status, answer = fetch(f"{url}/generate", body, timeout_s=120)
    assert status == 200, answer
    return tuple(answer["output_ids"])


def ask_hidden_states(server: Server) -> HiddenStates:
    """Of one long prompt, and of short ones that are decoded together."""
    fleet.forget_prefixes(server)
    prompt, _ = _hidden_states(server, [LONG], 1)
    of_short, of_tokens = _hidden_states(server, list(SHORT), 8)
    return HiddenStates(of_prompt=prompt + of_short, of_tokens=of_tokens)


def _hidden_states(
    server: Server, prompts: list[str], num_tokens: int
) -> tuple[list[Tensor], list[Tensor]]:
    body = {
        "text": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
        "return_hidden_states": True,
    }
    status, answers = fetch(f"{server.url}/generate", body, timeout_s=120)
    assert status == 200, answers
    states = [answer["meta_info"]["hidden_states"] for answer in answers]
    return [torch.tensor(one[0]) for one in states], [torch.tensor(one[1:]) for one in states]


def distance(expected: list[Tensor], got: list[Tensor]) -> float:
    """The largest difference, as a share of the largest value."""
    return max(
        float((want - have).abs().max() / want.abs().max())
        for want, have in zip(expected, got, strict=True)
        if want.numel()
    )


@EVERY
def test_answers_are_those_of_stock_sglang(asked: Asked, qwen3_oracle: Oracle) -> None:
    assert differences(qwen3_oracle.one_by_one, asked.one_by_one) == []
    assert differences(qwen3_oracle.at_once, asked.at_once) == []
    assert differences(qwen3_oracle.at_once, asked.again) == []
    assert differences(qwen3_oracle.at_once[: len(FEW)], asked.few) == []
    assert asked.mixed == [answer.token_ids for answer in qwen3_oracle.at_once]


@EVERY
def test_steps_are_cut_into_as_many_parts_as_asked_for(watched: Watched, asked: Asked) -> None:
    status = watched.status()
    by_number = status["steps_by_num_micro_batches"]

    assert status["num_steps"] == sum(by_number.values())
    assert by_number["1"] > 0  # batches of one
    match watched.setting:
        case "1":
            assert status["num_split_steps"] == 0
        case "auto":
            assert status["num_split_steps"] > 0
            assert by_number["3"] == 0
        case number:
            assert by_number[number] > 10
            assert all(by_number[str(more)] == 0 for more in range(int(number) + 1, 5))
            assert by_number["2"] > 0  # of batches of two


@EVERY
def test_every_kind_of_step_is_cut(watched: Watched, asked: Asked) -> None:
    seen = watched.seen()

    match watched.setting:
        case "1":
            assert seen == set()
        case "4":
            assert seen >= {"decode", "extend", "cut inside", "prefix", "mixed"}
        case "auto":
            assert "decode" in seen
            assert seen & {"extend", "mixed"}
        case _:
            assert seen >= {"decode", "extend", "cut inside", "prefix"}


@settings("1", "2", "3")
def test_auxiliary_hidden_states_are_those_of_stock_sglang(
    watched: Watched, stock_hidden_states: HiddenStates
) -> None:
    before = watched.status()["num_split_steps"]

    found = ask_hidden_states(watched.server)

    expected = stock_hidden_states
    assert expected.of_prompt[0].shape[1] == 2 * 128  # two layers are captured
    assert distance(expected.of_prompt, found.of_prompt) < HIDDEN_STATES_BOUND
    assert distance(expected.of_tokens, found.of_tokens) < HIDDEN_STATES_BOUND
    assert (watched.status()["num_split_steps"] > before) == (watched.setting != "1")


@settings("2")
@pytest.mark.parametrize("fault", ["wrong order", "wrong prefix", "wrong length"])
def test_a_planted_fault_would_be_noticed(
    watched: Watched, qwen3_oracle: Oracle, fault: str
) -> None:
    with watched.fault(fault):
        answers = ask_at_once([watched.server.url])

    assert differences(qwen3_oracle.at_once, answers) != []


@settings("2")
def test_hidden_states_in_the_wrong_order_would_be_noticed(
    watched: Watched, stock_hidden_states: HiddenStates
) -> None:
    with watched.fault("wrong order"):
        found = ask_hidden_states(watched.server)

    assert distance(stock_hidden_states.of_prompt, found.of_prompt) > HIDDEN_STATES_BOUND


@settings("2", "3")
def test_an_exception_in_one_micro_batch_leaves_no_trace(
    watched: Watched, qwen3_oracle: Oracle
) -> None:
    with watched.fault("raise"):
        for prompt in SHORT:  # until a step is cut in which it can be raised
            fetch(f"{watched.server.url}/generate", {"text": [prompt, LONG]}, timeout_s=120)
        wait_until(lambda: "raised" in watched.seen(), "the planted exception")
        fleet.wait_ready(watched.server)
    fleet.forget_prefixes(watched.server)
    answers = ask_at_once([watched.server.url])

    assert differences(qwen3_oracle.at_once, answers) == []
    assert "next step" in watched.seen()
    assert "something left over" not in watched.seen()
