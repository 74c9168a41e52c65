"""Fits Constants to measured steps: the most probable values given the priors and the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks
from sglang_afd.planner.constants import DEFAULTS, NAMES, PRIORS, Constants
from sglang_afd.planner.deployment import Deployment
from sglang_afd.planner.predict import Prediction, Scenario, predict

Floats = NDArray[np.float64]

# Repeated rows of the public data differ by this much; so a fit should not chase less.
ROW_NOISE = 0.03
# Beyond this many times the noise a row pulls with constant force: outliers do not bend the fit.
_OUTLIER_SIGMAS = 2.0
_MAX_STEPS = 60

STAGES: dict[str, Callable[[Prediction], float]] = {
    "step": lambda prediction: prediction.step_us,
    "core": lambda prediction: prediction.stages.core_us,
    "dense": lambda prediction: prediction.stages.dense_us,
    "experts": lambda prediction: prediction.stages.experts.total_us,
    "exchange": lambda prediction: prediction.stages.exchange_us,
    "outside_layers": lambda prediction: prediction.outside_layers_us,
}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured time: of a whole step, or of one stage of a layer and micro-batch."""

    scenario: Scenario  # its constants are not read
    deployment: Deployment
    time_us: float
    stage: str = "step"
    noise: float = ROW_NOISE  # standard deviation of the logarithm

    def __post_init__(self) -> None:
        owner = f"observation of {self.deployment.label}"
        if self.stage not in STAGES:
            raise ConfigError(f"{owner}: stage {self.stage!r}; wanted one of {', '.join(STAGES)}")
        if self.stage == "step":
            checks.step_us(owner, self.time_us)
        else:
            hint = "Wanted: microseconds."
            checks.between(owner, "time_us", self.time_us, 0.05, 1e6, hint)
        checks.positive(owner, "noise", self.noise)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Constants and how well the rows determine them."""

    constants: Constants
    covariance: tuple[tuple[float, ...], ...]  # of the logarithms, in the order of NAMES
    num_rows: int

    def spread(self, name: str) -> float:
        """Relative standard deviation of one constant."""
        index = NAMES.index(name)
        return math.sqrt(self.covariance[index][index])

    def relative_error(self, scenario: Scenario, deployment: Deployment) -> float:
        """Standard deviation of the predicted step, from that of the constants and of a row."""
        gradient = self.gradient(scenario, deployment)
        variance = float(gradient @ np.asarray(self.covariance) @ gradient)
        return math.sqrt(variance + ROW_NOISE**2)

    def gradient(self, scenario: Scenario, deployment: Deployment) -> Floats:
        """Of the logarithm of the step by the logarithm of each constant, in the order of NAMES."""
        return _gradient(_logs(self.constants), lambda x: _log_time(x, scenario, deployment))

    def gradient_of(self, time_us: Callable[[Constants], float]) -> Floats:
        """The same of any time that depends on the constants."""
        return _gradient(_logs(self.constants), lambda x: math.log(time_us(_constants(x))))


def fit(observations: Sequence[Observation], start: Constants = DEFAULTS) -> Fit:
    """Most probable constants; without observations the priors come back.

    Levenberg-Marquardt on the logarithms, with a pseudo-Huber loss on the rows.
    """
    weights = 1 / np.asarray([PRIORS[name].spread for name in NAMES]) ** 2
    centre = np.log([PRIORS[name].value for name in NAMES])
    low = np.log([PRIORS[name].low for name in NAMES])
    high = np.log([PRIORS[name].high for name in NAMES])
    x = np.clip(_logs(start), low, high)
    residuals = _residuals(x, observations)
    cost = _cost(residuals, x, centre, weights)
    damping = 1e-2
    for _ in range(_MAX_STEPS):
        normal, slope = _normal_equations(x, residuals, observations, centre, weights)
        accepted = False
        while not accepted and damping < 1e8:
            damped = normal + damping * np.diag(np.diag(normal))
            candidate = np.clip(x - np.linalg.solve(damped, slope), low, high)
            new_residuals = _residuals(candidate, observations)
            new_cost = _cost(new_residuals, candidate, centre, weights)
            accepted = new_cost < cost
            damping = damping / 5 if accepted else damping * 4
        if not accepted:
            break
        gained = cost - new_cost
        x, residuals, cost = candidate, new_residuals, new_cost
        if gained < 1e-6 * (1 + cost):
            break
    normal, _ = _normal_equations(x, residuals, observations, centre, weights)
    covariance = np.linalg.inv(normal)
    return Fit(
        constants=_constants(x),
        covariance=tuple(tuple(float(value) for value in row) for row in covariance),
        num_rows=len(observations),
    )


def _logs(constants: Constants) -> Floats:
    return np.log([getattr(constants, name) for name in NAMES])


def _constants(logs: Floats) -> Constants:
    values = {
        name: min(max(float(np.exp(log)), PRIORS[name].low), PRIORS[name].high)
        for name, log in zip(NAMES, logs, strict=True)
    }
    return Constants(**values)


def _log_time(
    logs: Floats, scenario: Scenario, deployment: Deployment, stage: str = "step"
) -> float:
    prediction = predict(scenario.with_constants(_constants(logs)), deployment)
    return math.log(STAGES[stage](prediction))


def _residuals(logs: Floats, observations: Sequence[Observation]) -> Floats:
    return np.asarray(
        [
            (_log_time(logs, row.scenario, row.deployment, row.stage) - math.log(row.time_us))
            / row.noise
            for row in observations
        ]
    )


def _cost(residuals: Floats, logs: Floats, centre: Floats, weights: Floats) -> float:
    scale = _OUTLIER_SIGMAS**2
    rows = 2 * scale * (np.sqrt(1 + residuals**2 / scale) - 1)
    return float(rows.sum() + (weights * (logs - centre) ** 2).sum())


def _normal_equations(
    logs: Floats,
    residuals: Floats,
    observations: Sequence[Observation],
    centre: Floats,
    weights: Floats,
) -> tuple[Floats, Floats]:
    trust = 1 / np.sqrt(1 + residuals**2 / _OUTLIER_SIGMAS**2)
    rows = [_row_gradient(logs, row) / row.noise for row in observations]
    jacobian = np.asarray(rows).reshape(len(rows), len(NAMES))
    normal = (jacobian * trust[:, None]).T @ jacobian + np.diag(weights)
    slope = (jacobian * trust[:, None]).T @ residuals + weights * (logs - centre)
    return normal, slope


def _row_gradient(logs: Floats, row: Observation) -> Floats:
    return _gradient(logs, lambda x: _log_time(x, row.scenario, row.deployment, row.stage))


def _gradient(logs: Floats, function: Callable[[Floats], float]) -> Floats:
    """By differences; towards the inside where a constant is at its bound."""
    base = function(logs)
    result = np.empty(len(logs))
    for index, name in enumerate(NAMES):
        room = math.log(PRIORS[name].high) - logs[index] > 1e-4
        delta = 1e-4 if room else -1e-4
        moved = logs.copy()
        moved[index] += delta
        result[index] = (function(moved) - base) / delta
    return result
