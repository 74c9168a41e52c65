"""Search, speed-up and verdict of one site, as every command wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_afd.planner.fit import Fit, Floats
from sglang_afd.planner.leverage import leverage
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.search import Found, Side, Space, search
from sglang_afd.planner.site import Site
from sglang_afd.planner.verdict import SIGMAS, Answer, Sensitivity, Verdict, judge, step_error


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Without a best deployment on one side there is no ratio, and no verdict."""

    found: Found
    answer: Answer
    verdict: Verdict | None


def answer(fitted: Fit, site: Site, space: Space, *, model_noise: float = 0.0) -> Answered:
    """Search both sides and compare the best of each.

    Raises: ConfigError, when nothing fits on either side.
    """
    found = search(site, space)
    base, other = found.colocated.best, found.disaggregated.best
    if base is None or other is None:
        only = of_one_side(
            fitted, [(site, found.colocated)], (site, found.disaggregated), model_noise
        )
        return Answered(found=found, answer=only, verdict=None)
    verdict = compare(fitted, site, base, other, model_noise=model_noise)
    return Answered(found=found, answer=verdict.answer, verdict=verdict)


def compare(
    fitted: Fit,
    site: Site,
    colocated: Prediction,
    disaggregated: Prediction,
    *,
    model_noise: float = 0.0,
    colocated_site: Site | None = None,
) -> Verdict:
    """The ratio of throughput per cost, and how sure it is.

    Args:
        fitted: Constants with their covariance.
        site: Of both deployments.
        colocated: The baseline.
        disaggregated: What is compared with it.
        model_noise: What constants cannot show, of the ratio.
        colocated_site: Of the baseline, where it is another one.
    """
    base_site = colocated_site or site

    return judge(
        fitted,
        _sensitivity(fitted, base_site, colocated, model_noise),
        _sensitivity(fitted, site, disaggregated, model_noise),
        speed_up=site.value(disaggregated) / base_site.value(colocated),
        model_noise=model_noise,
    )


def of_one_side(
    fitted: Fit,
    colocated: Sequence[tuple[Site, Side]],
    disaggregated: tuple[Site, Side],
    model_noise: float,
) -> Answer:
    """Where one side keeps the limit and the other does not; what has no room never does.

    Unsure when the errors of a step may bring the other side under the limit, or AFD above it.
    """
    site, side = disaggregated
    if side.best is None:
        could = _may_keep_limit(fitted, site, side, model_noise)
        return Answer.UNCERTAIN if could else Answer.DOES_NOT_PAY
    could = any(_may_keep_limit(fitted, *base, model_noise) for base in colocated)
    surely = _may_keep_limit(fitted, site, side, model_noise, sigmas=-SIGMAS)
    return Answer.PAYS if surely and not could else Answer.UNCERTAIN


def _may_keep_limit(
    fitted: Fit, site: Site, side: Side, model_noise: float, sigmas: float = SIGMAS
) -> bool:
    """Whether the fastest of a side would, if it were faster by this many deviations."""
    limit_us = site.scenario.workload.max_tpot_us
    if not side.tried or limit_us is None:
        return bool(side.tried)
    near = min(side.tried, key=lambda point: point.tpot_us).deployment
    fastest = site.predict(near.with_batch(near.micro_batches))
    error = step_error(fitted, _gradient(fitted, site, fastest), model_noise)
    return fastest.tpot_us * math.exp(-sigmas * error) <= limit_us


def _sensitivity(
    fitted: Fit, site: Site, prediction: Prediction, model_noise: float
) -> Sensitivity:
    gradient = _gradient(fitted, site, prediction)
    error = step_error(fitted, gradient, model_noise)
    return Sensitivity(gradient=gradient, leverage=leverage(site, prediction, SIGMAS * error))


def _gradient(fitted: Fit, site: Site, prediction: Prediction) -> Floats:
    return fitted.gradient_of(
        lambda x: site.with_constants(x).predict(prediction.deployment).step_us
    )
