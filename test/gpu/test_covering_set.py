"""Every way of serving answers what stock SGLang answers on the same GPU."""

from __future__ import annotations

from typing import Any

import gpu_report
import pytest
from compare import differences, largest_distance
from gpu_fleet import COMBINATIONS, IS_CPU, SLOW, START_TIMEOUT_S, Combination, Fleet, say, telling
from gpu_oracles import Oracles, Words
from gpu_questions import (
    AT_90_PERCENT,
    LOGPROB_BOUND,
    MEAN,
    Answers,
    ask_all,
    ask_crowd,
    continue_texts,
    distance,
)
from servers import Server

pytestmark = [pytest.mark.timeout(2 * START_TIMEOUT_S), pytest.mark.also_on_cpu]


@pytest.mark.parametrize(
    "combination", [*COMBINATIONS, pytest.param(SLOW, marks=pytest.mark.slow)], ids=str
)
def test_answers_are_those_of_stock_sglang(
    combination: Combination, fleets: Any, oracles: Oracles
) -> None:
    fleets.start(combination)
    expected = _expected(oracles, combination)
    fleet = fleets.take(combination)

    with telling(fleet.servers):
        fleet.ready()
        if isinstance(expected, Words):
            _check_distance(fleet, expected)
        else:
            _check_tokens(fleet, expected)
        for server in fleet.attn:
            _check_way(server, combination)
    say(f"{combination}: done")


def _expected(oracles: Oracles, combination: Combination) -> Answers | Words:
    if combination.precision == "exact":
        return oracles.answers(combination.family)
    return oracles.words(combination.family, combination.precision)


def _check_tokens(fleet: Fleet, expected: Answers) -> None:
    got = ask_all(fleet.urls)
    again = ask_crowd(fleet.urls[::-1])  # with cached prefixes, where a server has the prompt

    apart = largest_distance(expected.all() + expected.crowd, got.all() + again)
    gpu_report.record(f"logprobs apart, {fleet.name}", f"{apart:.2e}")
    assert differences(expected.alone, got.alone, bound=LOGPROB_BOUND) == []
    assert differences(expected.crowd, got.crowd, bound=LOGPROB_BOUND) == []
    assert differences(expected.crowd, again, bound=LOGPROB_BOUND) == []


def _check_distance(fleet: Fleet, expected: Words) -> None:
    got = continue_texts(fleet.urls, expected.texts)

    found = distance(expected.continuations, got)
    gpu_report.record(f"stock SGLang apart from itself, {fleet.name}", str(expected.own_distance))
    gpu_report.record(f"apart from stock SGLang, {fleet.name}", str(found))
    assert found.at_90_percent <= AT_90_PERCENT
    assert found.mean <= MEAN


def _check_way(server: Server, combination: Combination) -> None:
    """That it ran the way it was asked to."""
    status = server.get("/afd/v1/status")[1]
    steps = status["steps_by_num_micro_batches"]
    assert steps[str(combination.num_micro_batches)] > 0, steps
    if not IS_CPU:
        assert status["transport"] == combination.transport
