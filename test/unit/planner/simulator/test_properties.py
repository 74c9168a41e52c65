"""What holds for any simulation: seeds, conservation, accounts, harmless short cuts."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from simulated import all_steps, both, deployment, scenario

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Deployment, Mode
from sglang_afd.planner.simulator.disturbance import (
    QUIET,
    TYPICAL,
    Disturbance,
    Failure,
    Lost,
)
from sglang_afd.planner.simulator.simulation import Options, simulate
from sglang_afd.planner.simulator.timeline import Span, chrome_trace

NOISY = replace(TYPICAL, prefill_per_step=0.1, prefill_tokens=(64, 256), stall_per_step=0.02)
TROUBLE = replace(
    NOISY,
    notice_us=5_000,
    failures=(
        Failure(lost=Lost.MLP, index=1, at_us=12_000, back_after_us=30_000),
        Failure(lost=Lost.ATTENTION, index=2, at_us=60_000, back_after_us=20_000),
        Failure(lost=Lost.ATTENTION, index=4, at_us=75_000),
        Failure(lost=Lost.MLP, index=0, at_us=90_000, back_after_us=10_000),
    ),
)
CASES = {"quiet": QUIET, "typical": TYPICAL, "noisy": NOISY, "trouble": TROUBLE}

disturbances = some.builds(
    Disturbance,
    attn_jitter=some.sampled_from([0.0, 0.1]),
    mlp_jitter=some.sampled_from([0.0, 0.1]),
    exchange_jitter=some.sampled_from([0.0, 0.3]),
    gap_jitter=some.sampled_from([0.0, 0.5]),
    start_spread=some.sampled_from([0.0, 1.0]),
    prefill_per_step=some.sampled_from([0.0, 0.3]),
    stall_per_step=some.sampled_from([0.0, 0.1]),
    failures=some.lists(
        some.builds(
            Failure,
            lost=some.sampled_from(Lost),
            index=some.integers(0, 1),
            at_us=some.floats(1_000, 60_000),
            back_after_us=some.floats(100, 30_000) | some.none(),
        ),
        max_size=2,
    ).map(tuple),
)


@settings(max_examples=40, deadline=None)
@given(
    disturbance=disturbances,
    m=some.integers(1, 3),
    has_rounds=some.booleans(),
    is_literal=some.booleans(),
    seed=some.integers(0, 9),
)
def test_every_exchange_is_answered_once_or_lost_with_its_server(
    disturbance: Disturbance, m: int, has_rounds: bool, is_literal: bool, seed: int
) -> None:
    _, found = both(
        deployment(4, 2, m=m),
        disturbance,
        scenario(layers=4),
        has_rounds=has_rounds,
        is_literal=is_literal,
        seed=seed,
    )

    # That none is answered twice is asserted where answers are taken; what is under way when the
    # simulation ends is at most one exchange of each micro-batch.
    counts = found.exchanges
    under_way = counts.sent - counts.answered - counts.lost
    assert 0 <= under_way <= found.num_servers * m
    assert sum(astuple(found.shares)) == pytest.approx(1) or not all_steps(found)
    is_lost_for_ever = any(
        each.lost is Lost.MLP and each.back_after_us is None for each in disturbance.failures
    )
    assert is_lost_for_ever or not found.num_stuck_groups


@pytest.mark.parametrize("case", ["typical", "noisy", "trouble"])
def test_the_same_seed_gives_the_same_result_and_another_one_another(case: str) -> None:
    where = deployment(6, 2)

    _, first = both(where, CASES[case], seed=3)
    _, second = both(where, CASES[case], seed=3)
    _, third = both(where, CASES[case], seed=4)

    assert first == second
    assert first.steps_us != third.steps_us


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("case", ["quiet", "typical"])
def test_the_short_cuts_give_the_times_of_the_real_queues(case: str, m: int) -> None:
    where = deployment(12, 4, m=m)

    _, short = both(where, CASES[case])
    _, literal = both(where, CASES[case], is_literal=True)

    assert all_steps(short) == pytest.approx(all_steps(literal), rel=1e-9)
    assert short.num_events < literal.num_events


def test_with_prefill_the_short_cuts_stay_within_three_percent() -> None:
    """Ranks that follow cut prefill by themselves, which the short cuts leave out."""
    where, disturbance = deployment(12, 4), replace(TYPICAL, prefill_per_step=0.05)

    _, short = both(where, disturbance, num_steps=40)
    _, literal = both(where, disturbance, num_steps=40, is_literal=True)

    assert short.tokens_per_s_per_gpu == pytest.approx(literal.tokens_per_s_per_gpu, rel=0.03)
    assert short.prefill.number == pytest.approx(literal.prefill.number, abs=3)


@pytest.mark.parametrize("case", CASES)
def test_the_accounts_of_a_server_add_up_to_its_time(case: str) -> None:
    _, found = both(deployment(6, 2), CASES[case], num_steps=20)

    shares = astuple(found.shares)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0
    assert found.shares.attention == found.attn_busy


def test_each_disturbance_is_found_on_its_account() -> None:
    where = deployment(6, 2)
    _, quiet = both(where)

    def shares(disturbance: Disturbance, **options: object) -> dict[str, float]:
        _, found = both(where, replace(disturbance, start_spread=0), num_steps=20, **options)
        return {
            name: getattr(found.shares, name) - getattr(quiet.shares, name)
            for name in ("barrier", "prefill", "failure", "queue")
        }

    lost = Failure(lost=Lost.MLP, at_us=12_000, back_after_us=30_000)
    assert shares(Disturbance(attn_jitter=0.2))["barrier"] > 0.01
    assert shares(Disturbance(prefill_per_step=0.1))["prefill"] > 0.01
    assert shares(Disturbance(failures=(lost,)))["failure"] > 0.05
    assert shares(QUIET, has_rounds=False)["queue"] > 0.1
    assert shares(QUIET)["failure"] == shares(QUIET)["prefill"] == 0


@pytest.mark.parametrize("name", ["attn_jitter", "prefill_per_step", "stall_per_step"])
def test_more_of_a_disturbance_never_gives_more_tokens(name: str) -> None:
    rates = []
    for share in (0.0, 0.05, 0.15, 0.3):
        _, found = both(deployment(8, 2), replace(QUIET, **{name: share}), num_steps=30)
        rates.append(found.tokens_per_s_per_gpu)

    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.97 * rates[0]


def test_more_spread_of_contexts_gives_a_longer_step() -> None:
    where = deployment(16, 4, m=1, batch=32)
    means = [
        both(where, world=scenario(context_std=std), num_steps=40)[1].step.mean_us
        for std in (0, 2000, 8000)
    ]

    assert means == sorted(means)
    assert means[-1] > 1.02 * means[0]


def test_an_instance_changes_nothing_for_the_others() -> None:
    where = deployment(4, 2)

    _, one = both(where, NOISY)
    _, three = both(where, NOISY, instances=3)

    assert three.num_servers == 12
    assert three.steps_us[:4] == one.steps_us


def test_intervals_of_a_span_lie_within_its_step_and_never_overlap_on_a_server() -> None:
    _, found = both(deployment(3, 1), TYPICAL, span=Span(first_step=3))

    lanes: dict[str, list[tuple[float, float]]] = {}
    for each in found.intervals:
        lanes.setdefault(each.server, []).append((each.start_us, each.end_us))
    assert set(lanes) == {"attn 0", "attn 1", "attn 2", "mlp 0"}
    for lane in lanes.values():
        lane.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(lane, lane[1:], strict=False))
    assert len(lanes["attn 0"]) == 24  # 12 layers, 2 micro-batches
    events = chrome_trace(found.intervals)["traceEvents"]
    assert len(events) == len(found.intervals) + 4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Disturbance(attn_jitter=5), "attn_jitter is 5, a share: 5 % is 0.05"),
        (lambda: Disturbance(mlp_jitter=-0.1), "0 or more"),
        (lambda: Disturbance(prefill_tokens=(9, 3)), "the lower one first"),
        (lambda: Failure(lost=Lost.MLP, at_us=-1), "0 or more"),
        (lambda: Options(num_steps=0), "above 0"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (Failure(lost=Lost.MLP, group=2, at_us=1), "there are 1"),
        (Failure(lost=Lost.MLP, index=2, at_us=1), "it has 2"),
        (Failure(lost=Lost.ATTENTION, index=8, at_us=1), "it has 8"),
    ],
)
def test_a_failure_of_nobody_is_refused(failure: Failure, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        both(deployment(8, 2), replace(QUIET, failures=(failure,)))


def test_a_colocated_deployment_has_nothing_to_simulate() -> None:
    where = Deployment(mode=Mode.COLOCATED, attn_gpus=4, expert_parallel=4, batch_per_attn_gpu=8)

    with pytest.raises(ConfigError, match="only a disaggregated deployment has rounds"):
        simulate(scenario(), where)
