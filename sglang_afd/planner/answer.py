"""Search, speed-up and verdict of one site, as every command wants them."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.planner.fit import Fit
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.search import Found, Space, search
from sglang_afd.planner.site import Site
from sglang_afd.planner.verdict import Answer, Verdict, judge


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Without a best deployment on one side there is no ratio, and the answer is certain."""

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
        sure = Answer.PAYS if base is None else Answer.DOES_NOT_PAY
        return Answered(found=found, answer=sure, verdict=None)
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

    slower = fitted.gradient_of(
        lambda x: base_site.with_constants(x).predict(colocated.deployment).step_us
    )
    faster = fitted.gradient_of(
        lambda x: site.with_constants(x).predict(disaggregated.deployment).step_us
    )
    return judge(
        fitted,
        slower - faster,
        speed_up=site.value(disaggregated) / base_site.value(colocated),
        model_noise=model_noise,
    )
