"""Search, speed-up and verdict of one scenario, as every command wants them."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.planner.fit import Fit
from sglang_afd.planner.predict import Scenario
from sglang_afd.planner.search import Found, Space, search
from sglang_afd.planner.speedup import SpeedUp, speed_up
from sglang_afd.planner.verdict import Answer, Verdict, judge


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Without a best deployment on one side there is no speed-up, and the answer is certain."""

    found: Found
    answer: Answer
    result: SpeedUp | None
    verdict: Verdict | None


def answer(
    fitted: Fit, scenario: Scenario, space: Space, *, model_noise: float = 0.0
) -> Answered:
    """Search both sides and compare the best of each.

    Raises: ConfigError, when nothing fits on either side.
    """
    found = search(scenario, space)
    base, other = found.colocated.best, found.disaggregated.best
    if base is None or other is None:
        sure = Answer.PAYS if base is None else Answer.DOES_NOT_PAY
        return Answered(found=found, answer=sure, result=None, verdict=None)
    result = speed_up(scenario, base.deployment, other.deployment)
    verdict = judge(
        fitted,
        scenario,
        colocated=base.deployment,
        disaggregated=other.deployment,
        speed_up=result.total,
        model_noise=model_noise,
    )
    return Answered(found=found, answer=verdict.answer, result=result, verdict=verdict)
