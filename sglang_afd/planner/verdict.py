"""Whether AFD pays, with the uncertainty of the ratio of two predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from sglang_afd.planner.constants import NAMES
from sglang_afd.planner.fit import ROW_NOISE, Fit, Floats

# One in twenty on each side.
SIGMAS = 1.645


class Answer(Enum):
    """What a person does with it."""

    PAYS = "pays"
    DOES_NOT_PAY = "does not pay"
    UNCERTAIN = "uncertain"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One constant's share of the variance of the speed-up."""

    name: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of a speed-up; `low` to `high` holds the true one in 9 of 10 cases."""

    answer: Answer
    speed_up: float
    low: float
    high: float
    relative_error: float  # standard deviation of the logarithm
    probability: float  # that the speed-up is above 1
    causes: tuple[Cause, ...]  # largest first


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Of one side's throughput."""

    gradient: Floats  # of the logarithm of the step by that of each constant, in order of NAMES
    leverage: float = 1.0  # throughput lost for a step that is so much longer; see leverage.py


def step_error(fitted: Fit, gradient: Floats, model_noise: float = 0.0) -> float:
    """Standard deviation of the logarithm of one step; half of the noise of a ratio is its own."""
    variance = float(gradient @ np.asarray(fitted.covariance) @ gradient)
    return math.sqrt(variance + ROW_NOISE**2 + model_noise**2 / 2)


def judge(
    fitted: Fit,
    colocated: Sensitivity,
    disaggregated: Sensitivity,
    *,
    speed_up: float,
    model_noise: float = 0.0,
) -> Verdict:
    """A constant that moves both steps alike moves their ratio little: the errors are correlated.

    Args:
        fitted: Constants with their covariance.
        colocated: How its throughput follows from its step.
        disaggregated: The same.
        speed_up: The predicted ratio of throughputs.
        model_noise: What constants cannot show, of the ratio of two steps.
    """
    gradient = (
        colocated.leverage * colocated.gradient - disaggregated.leverage * disaggregated.gradient
    )
    covariance = np.asarray(fitted.covariance)
    parts = gradient * (covariance @ gradient)
    # Each of the two steps has what no constant explains, independently of the other.
    rest = (colocated.leverage**2 + disaggregated.leverage**2) * (ROW_NOISE**2 + model_noise**2 / 2)
    variance = float(parts.sum()) + rest
    causes = [
        Cause(name=name, share=float(part) / variance)
        for name, part in zip(NAMES, parts, strict=True)
    ]
    causes.append(Cause(name="what no constant explains", share=rest / variance))
    return _verdict(speed_up, math.sqrt(variance), causes)


def _verdict(speed_up: float, error: float, causes: list[Cause]) -> Verdict:
    low, high = (speed_up * math.exp(sign * SIGMAS * error) for sign in (-1, 1))
    answer = Answer.PAYS if low > 1 else Answer.DOES_NOT_PAY if high < 1 else Answer.UNCERTAIN
    probability = 0.5 * math.erfc(-math.log(speed_up) / error / math.sqrt(2))
    return Verdict(
        answer=answer,
        speed_up=speed_up,
        low=low,
        high=high,
        relative_error=error,
        probability=probability,
        causes=tuple(sorted(causes, key=lambda cause: -cause.share)),
    )
