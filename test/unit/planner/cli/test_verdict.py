"""The verdict knows how sure it is, and that errors of both sides belong together."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import PRIORS, site

from sglang_afd.planner.answer import answer, compare, of_one_side
from sglang_afd.planner.constants import NAMES, Constants
from sglang_afd.planner.deployment import Deployment, ExpertKernels
from sglang_afd.planner.fit import ROW_NOISE, Fit, Observation, fit
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.leverage import leverage
from sglang_afd.planner.search import (
    Side,
    Space,
    best_batch,
    search,
    search_disaggregated,
)
from sglang_afd.planner.site import Site
from sglang_afd.planner.verdict import Answer, Sensitivity, judge

NOTHING = np.zeros(len(NAMES))
STILL = Sensitivity(gradient=NOTHING)
ONE_OF_8 = Space(max_gpus=8, expert_parallel=(4,), micro_batches=(2,))


@pytest.mark.parametrize(
    ("speed_up", "expected"),
    [
        (0.80, Answer.DOES_NOT_PAY),
        (0.92, Answer.DOES_NOT_PAY),
        (0.95, Answer.UNCERTAIN),
        (1.00, Answer.UNCERTAIN),
        (1.06, Answer.UNCERTAIN),
        (1.08, Answer.PAYS),
        (1.40, Answer.PAYS),
    ],
)
def test_the_answer_is_sure_only_when_9_of_10_cases_agree(
    speed_up: float, expected: Answer
) -> None:
    verdict = judge(PRIORS, STILL, STILL, speed_up=speed_up)

    assert verdict.answer is expected
    assert verdict.low < speed_up < verdict.high


def test_the_error_of_equal_steps_is_that_of_two_rows() -> None:
    where = site()
    best = search(where, Space(max_gpus=8)).colocated.best
    assert best is not None

    verdict = compare(PRIORS, where, best, best)

    assert verdict.relative_error == pytest.approx(math.sqrt(2) * ROW_NOISE)
    assert verdict.probability == pytest.approx(0.5)


def _fitted(where: Site, deployments: list[Deployment]) -> Fit:
    """To its own predictions: constants stay, and what rows cannot tell apart is correlated."""
    return fit(
        [
            Observation(
                scenario=where.scenario,
                deployment=deployment,
                time_us=where.predict(deployment).step_us,
            )
            for deployment in deployments
        ]
    )


def test_the_error_is_that_of_drawn_constants() -> None:
    where = site("Qwen3-235B-A22B-FP8", GPUS["GB200"], 8192)
    found = search(where, Space(max_gpus=32))
    base, other = found.colocated.best, found.disaggregated.best
    assert base is not None
    assert other is not None
    sides = [base.deployment, other.deployment]
    fitted = _fitted(where, [side.with_batch(n) for side in sides for n in (8, 32, 90)])
    small = 0.05  # so small that the steps are linear in it and no constant meets a bound

    verdict = compare(fitted, where.with_constants(fitted.constants), base, other)

    rng = np.random.default_rng(1)
    draws = rng.multivariate_normal(NOTHING, small**2 * np.asarray(fitted.covariance), size=400)
    ratios = []
    for draw in draws:
        values = {
            name: getattr(fitted.constants, name) * math.exp(change)
            for name, change in zip(NAMES, draw, strict=True)
        }
        drawn = where.with_constants(Constants(**values))
        ratios.append(
            math.log(
                drawn.predict(base.deployment).step_us / drawn.predict(other.deployment).step_us
            )
        )
    of_constants = math.sqrt(verdict.relative_error**2 - 2 * ROW_NOISE**2)
    assert np.std(ratios) / small == pytest.approx(of_constants, rel=0.12)


def _limited(limit_us: float, error: float) -> Site:
    """The site with a limit that a step so much slower than predicted would meet."""
    return site(max_tpot_us=limit_us * math.exp(-error))


def test_where_a_limit_binds_the_error_of_a_step_is_that_of_the_batch_which_keeps_it() -> None:
    limit_us = 20_000.0
    found = search(_limited(limit_us, 0), Space(max_gpus=8))

    for side in (found.colocated, found.disaggregated):
        best = side.best
        assert best is not None
        factor = leverage(_limited(limit_us, 0), best, error=0.03)

        slower, faster = (
            best_batch(_limited(limit_us, error), best.deployment) for error in (0.03, -0.03)
        )
        assert slower is not None
        assert faster is not None
        batches = faster.deployment.batch_per_attn_gpu / slower.deployment.batch_per_attn_gpu
        assert math.log(batches) / 0.06 == pytest.approx(factor, rel=0.1)
        assert factor > 1.5


def test_a_limit_far_away_has_no_leverage() -> None:
    best = search(site(), Space(max_gpus=8)).colocated.best
    assert best is not None

    assert leverage(site(), best, error=0.05) == 1
    assert leverage(site(max_tpot_us=2 * best.tpot_us), best, error=0.05) == 1
    assert leverage(site(max_tpot_us=1.02 * best.tpot_us), best, error=0.05) > 1


def test_the_error_under_a_limit_is_that_of_drawn_constants() -> None:
    where = site(max_tpot_us=20_000.0)
    found = search(where, Space(max_gpus=8))
    base, other = found.colocated.best, found.disaggregated.best
    assert base is not None
    assert other is not None
    small = 0.2  # far below that, the batches jump

    verdict = compare(PRIORS, where, base, other)

    rng = np.random.default_rng(3)
    draws = rng.multivariate_normal(NOTHING, small**2 * np.asarray(PRIORS.covariance), size=250)
    ratios = []
    for draw in draws:
        factors = dict(zip(NAMES, np.exp(draw), strict=True))
        drawn = where.with_constants(PRIORS.constants.scaled(**factors))
        sides = [best_batch(drawn, side.deployment) for side in (base, other)]
        values = [drawn.value(side) for side in sides if side is not None]
        ratios.append(math.log(values[1] / values[0]))
    of_constants = math.sqrt(
        sum(cause.share for cause in verdict.causes if cause.name in NAMES)
        * verdict.relative_error**2
    )
    assert np.std(ratios) / small == pytest.approx(of_constants, rel=0.2)


def _fastest_us(side: Side) -> float:
    deployments = {point.deployment.with_batch(2) for point in side.tried}
    return min(site().predict(one.with_batch(one.micro_batches)).tpot_us for one in deployments)


@pytest.mark.parametrize(
    ("of_the_fastest", "expected"),
    [(0.7, Answer.DOES_NOT_PAY), (0.99, Answer.UNCERTAIN)],
)
def test_a_limit_that_afd_misses_by_less_than_the_error_is_no_sure_answer(
    of_the_fastest: float, expected: Answer
) -> None:
    fastest = _fastest_us(search(site(), ONE_OF_8).disaggregated)

    where = site(max_tpot_us=of_the_fastest * fastest)
    side = search_disaggregated(where, ONE_OF_8)

    kept = of_one_side(PRIORS, [], (where, side), model_noise=0.0)

    assert side.best is None
    assert kept is expected


@pytest.mark.parametrize(
    ("limit_of_afd", "limit_of_colocated", "expected"),
    [
        (2.0, 0.8, Answer.PAYS),
        (1.01, 0.8, Answer.UNCERTAIN),
        (2.0, 0.99, Answer.UNCERTAIN),
    ],
)
def test_a_limit_that_only_afd_keeps_is_a_sure_answer_only_beyond_the_errors(
    limit_of_afd: float, limit_of_colocated: float, expected: Answer
) -> None:
    found = search(site(), ONE_OF_8)

    def under(side: Side, share: float) -> tuple[Site, Side]:
        where = site(max_tpot_us=share * _fastest_us(side))
        return where, replace(side, best=side.best if share > 1 else None)

    kept = of_one_side(
        PRIORS,
        [under(found.colocated, limit_of_colocated)],
        under(found.disaggregated, limit_of_afd),
        model_noise=0.0,
    )

    assert kept is expected


def test_shared_constants_cancel_so_the_ratio_is_surer_than_the_steps_are() -> None:
    where = site("Qwen3-235B-A22B-FP8", GPUS["GB200"], 32_768)
    found = search(where, Space(max_gpus=32))
    base, other = found.colocated.best, found.disaggregated.best
    assert base is not None
    assert other is not None

    verdict = compare(PRIORS, where, base, other)

    apart = [PRIORS.relative_error(where.scenario, side.deployment) ** 2 for side in (base, other)]
    assert verdict.relative_error**2 < sum(apart)


def test_noise_of_an_unmeasured_model_widens_the_interval() -> None:
    known = judge(PRIORS, STILL, STILL, speed_up=1.1)
    unknown = judge(PRIORS, STILL, STILL, speed_up=1.1, model_noise=0.05)

    assert unknown.low < known.low < known.high < unknown.high


def test_the_shares_of_the_causes_add_up_to_one() -> None:
    answered = answer(PRIORS, site(), Space(max_gpus=8))

    assert answered.verdict is not None
    shares = [cause.share for cause in answered.verdict.causes]
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)


def test_a_tight_limit_on_a_small_host_does_not_pay() -> None:
    answered = answer(PRIORS, site(max_tpot_us=20_000.0), Space(max_gpus=8))

    assert answered.answer is Answer.DOES_NOT_PAY


def test_fused_kernels_on_a_rack_pay() -> None:
    where = site("Qwen3-235B-A22B-FP8", GPUS["GB200"], 8192)

    answered = answer(PRIORS, where, Space(max_gpus=72, expert_kernels=ExpertKernels.FUSED))

    assert answered.answer is Answer.PAYS


def test_a_single_gpu_cannot_be_split_and_the_answer_is_certain() -> None:
    answered = answer(PRIORS, site(), Space(max_gpus=1))

    assert answered.answer is Answer.DOES_NOT_PAY
    assert answered.verdict is None
