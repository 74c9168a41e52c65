"""Every way of serving answers what stock SGLang answers on the same GPU."""

from __future__ import annotations

import gpu_fleet
import gpu_report
import pytest
from compare import differences, largest_distance
from gpu_ahead import Ahead, Setup
from gpu_fleet import (
    COMBINATIONS,
    IS_CPU,
    SLOW,
    START_TIMEOUT_S,
    Combination,
    Fleet,
    metric,
    say,
    telling,
)
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

pytestmark = [pytest.mark.timeout(2 * START_TIMEOUT_S), pytest.mark.also_on_cpu]


def _setup(combination: Combination) -> Setup[Fleet]:
    key = (combination.family, combination.precision)
    return Setup(
        str(combination),
        combination.num_attn + combination.num_mlp,
        lambda stage: gpu_fleet.start_fleet(stage.zygote, stage.models[key], combination),
        stock=(key,),
    )


def _case(combination: Combination, *marks: pytest.MarkDecorator) -> object:
    setup = _setup(combination)
    marks = (*marks, pytest.mark.wants(setup))
    return pytest.param(combination, setup, marks=marks, id=str(combination))


@pytest.mark.parametrize(
    ("combination", "setup"),
    [*(_case(each) for each in COMBINATIONS), _case(SLOW, pytest.mark.slow)],
)
def test_answers_are_those_of_stock_sglang(
    combination: Combination, setup: Setup[Fleet], ahead: Ahead, oracles: Oracles
) -> None:
    fleet = ahead.take(setup)

    with telling(fleet.servers):
        expected = _expected(oracles, combination)
        fleet.ready()
        if isinstance(expected, Words):
            _check_distance(fleet, expected)
        else:
            _check_tokens(fleet, expected)
        _check_way(fleet, combination)
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


def _check_way(fleet: Fleet, combination: Combination) -> None:
    """That it ran the way it was asked to."""
    for server in fleet.attn:
        steps = server.get("/afd/v1/status")[1]["steps_by_num_micro_batches"]
        assert steps[str(combination.num_micro_batches)] > 0, steps
        if not IS_CPU:
            assert ("cuda graph: True" in server.text()) == combination.has_graphs
    if not IS_CPU:
        for rank in fleet.mlp:
            is_on_device = combination.transport == "cuda_ipc"
            assert (metric(rank, "launches_total") > 0) == is_on_device
            has_graphs = is_on_device and combination.has_graphs
            assert (metric(rank, "graph_runs_total") > 0) == has_graphs
