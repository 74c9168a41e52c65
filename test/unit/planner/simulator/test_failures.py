"""A failure costs the time that a server is away, what has to be done again, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated import both, deployment, scenario

from sglang_afd.planner.simulator.disturbance import QUIET, TYPICAL, Disturbance, Failure, Lost

AWAY_US = 50_000.0


def _with(*failures: Failure, notice_us: float = 0.0, base: Disturbance = QUIET) -> Disturbance:
    return replace(base, failures=failures, notice_us=notice_us)


@pytest.mark.parametrize("is_literal", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_a_lost_rank_costs_its_group_the_time_until_it_is_back_and_one_unit(
    index: int, is_literal: bool
) -> None:
    failure = Failure(lost=Lost.MLP, index=index, at_us=30_000, back_after_us=AWAY_US)

    predicted, found = both(deployment(8, 2), _with(failure), num_steps=12, is_literal=is_literal)

    stages = predicted.stages
    again_us = stages.attn_us + stages.mlp_us + 2 * stages.exchange_us
    for steps_us in found.steps_us:
        extra_us = sum(steps_us) - len(steps_us) * predicted.step_us
        assert AWAY_US - again_us <= extra_us <= AWAY_US + again_us
        assert sum(us > 1.01 * predicted.step_us for us in steps_us) == 1
    assert found.exchanges.lost == 0
    assert 0 < found.exchanges.resent <= 16


def test_a_group_stands_still_until_the_last_of_its_lost_ranks_is_back() -> None:
    early = Failure(lost=Lost.MLP, index=1, at_us=30_000, back_after_us=AWAY_US)
    late = Failure(lost=Lost.MLP, index=0, at_us=50_000, back_after_us=AWAY_US)

    predicted, found = both(deployment(8, 2), _with(early, late), num_steps=12)

    for steps_us in found.steps_us:
        extra_us = sum(steps_us) - len(steps_us) * predicted.step_us
        assert extra_us == pytest.approx(AWAY_US + 20_000, abs=1_000)


def test_other_groups_do_not_notice_a_lost_rank() -> None:
    failure = Failure(lost=Lost.MLP, group=1, index=1, at_us=30_000, back_after_us=AWAY_US)
    where = deployment(12, 6, 2)

    _, calm = both(where, TYPICAL)
    _, found = both(where, _with(failure, base=TYPICAL))

    assert found.steps_us[:4] == calm.steps_us[:4]
    assert found.steps_us[4:8] != calm.steps_us[4:8]
    assert found.steps_us[8:] == calm.steps_us[8:]


@pytest.mark.parametrize("is_literal", [False, True])
def test_a_lost_attention_server_costs_the_others_the_time_until_it_is_noticed(
    is_literal: bool,
) -> None:
    failure = Failure(lost=Lost.ATTENTION, index=2, at_us=30_000)
    notice_us = 4_000.0

    predicted, found = both(
        deployment(8, 2),
        _with(failure, notice_us=notice_us),
        num_steps=12,
        is_literal=is_literal,
    )

    assert len(found.steps_us[2]) < 12
    for number, steps_us in enumerate(found.steps_us):
        if number != 2:
            extra_us = sum(steps_us) - len(steps_us) * predicted.step_us
            assert extra_us <= notice_us + 1
            assert max(steps_us) > predicted.step_us + 0.5 * notice_us
    assert 0 < found.exchanges.lost <= 2


def test_a_lost_attention_server_that_is_back_decodes_on() -> None:
    failure = Failure(lost=Lost.ATTENTION, index=2, at_us=30_000, back_after_us=AWAY_US)

    predicted, found = both(deployment(8, 2), _with(failure), num_steps=12)

    assert len(found.steps_us[2]) == 12
    assert max(found.steps_us[2]) <= AWAY_US + 3 * predicted.step_us
    assert max(found.steps_us[2]) >= AWAY_US
    for number, steps_us in enumerate(found.steps_us):
        assert number == 2 or max(steps_us) <= predicted.step_us * 1.000001


def test_a_rank_that_never_comes_back_stops_its_group_and_no_other() -> None:
    failure = Failure(lost=Lost.MLP, group=1, at_us=30_000)
    where = deployment(8, 2, 1)

    _, calm = both(where, num_steps=12)
    _, found = both(where, _with(failure), num_steps=12)

    assert found.steps_us[:4] == calm.steps_us[:4]
    assert all(len(steps_us) < 12 for steps_us in found.steps_us[4:])
    assert 0.5 < found.tokens_per_s_per_gpu / calm.tokens_per_s_per_gpu < 0.95
    assert found.shares.failure > 0.1
    assert found.num_stuck_groups == 1


def test_a_server_that_hangs_is_parked_and_the_others_go_on() -> None:
    """With real layers, as parking waits for half of a round."""
    world = scenario(layers=48)
    hangs = Disturbance(stall_per_step=0.01, stall_us=(100_000, 100_000))

    predicted, found = both(deployment(8, 2), hangs, world, num_steps=40, warm_steps=4)

    assert found.parked > 0
    assert found.step.p50_us < 1.05 * predicted.step_us
    delayed = sum(us > predicted.step_us + 90_000 for each in found.steps_us for us in each)
    assert delayed <= 2 * found.parked


@pytest.mark.parametrize("again_us", [30_000, 40_000])
def test_a_server_that_is_away_cannot_be_lost_again(again_us: float) -> None:
    first = Failure(lost=Lost.ATTENTION, index=1, at_us=30_000, back_after_us=AWAY_US)
    second = replace(first, at_us=again_us)

    _, once = both(deployment(4, 2), _with(first), num_steps=12)
    _, twice = both(deployment(4, 2), _with(first, second), num_steps=12)

    assert twice.steps_us == once.steps_us
    assert twice.exchanges == once.exchanges
