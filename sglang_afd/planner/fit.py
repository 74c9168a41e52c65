"""Fits Constants to measured steps: the most probable values given the priors and the rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks
from sglang_afd.planner.constants import DEFAULTS, NAMES, PRIORS, Constants
from sglang_afd.planner.deployment import Deployment
from sglang_afd.planner.scenario import Scenario, check_experts, check_jitter
from sglang_afd.planner.step import Step, reads, step_of

Floats = NDArray[np.float64]

# Repeated rows of the public data differ by this much; so a fit should not chase less.
ROW_NOISE = 0.03
# Beyond this many times the noise a row pulls with constant force: outliers do not bend the fit.
_OUTLIER_SIGMAS = 2.0
# A denser sweep over batches shows the noise better, but not what the physics leaves out, which
# neighbours have in common: beyond this many rows of a sweep none adds weight.
_MOST_ROWS_OF_A_SWEEP = 16
_MAX_STEPS = 60
_LARGE = 10**6  # a batch that stands for all of them

STAGES: dict[str, Callable[[Step], float]] = {
    "step": lambda step: step.step_us,
    "core": lambda step: step.stages.core_us,
    "dense": lambda step: step.stages.dense_us,
    "experts": lambda step: step.stages.experts.total_us,
    "exchange": lambda step: step.stages.exchange_us,
    "outside_layers": lambda step: step.outside_layers_us,
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
        check_experts(self.scenario.shape, self.deployment)
        check_jitter(self.scenario, self.deployment)


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
        return self.gradient_of(lambda x: step_of(scenario.with_constants(x), deployment).step_us)

    def gradient_of(self, time_us: Callable[[Constants], float]) -> Floats:
        """The same of any time that depends on the constants."""
        logs = _logs(self.constants)
        base = math.log(time_us(self.constants))
        result = np.empty(len(NAMES))
        for index, delta in enumerate(_deltas(logs)):
            result[index] = (math.log(time_us(_moved(logs, index, delta))) - base) / delta
        return result


def fit(observations: Sequence[Observation], start: Constants = DEFAULTS) -> Fit:
    """Most probable constants; without observations the priors come back.

    Levenberg-Marquardt on the logarithms, with a pseudo-Huber loss on the rows.
    """
    weights = 1 / np.asarray([PRIORS[name].spread for name in NAMES]) ** 2
    centre = np.log([PRIORS[name].value for name in NAMES])
    low = np.log([PRIORS[name].low for name in NAMES])
    high = np.log([PRIORS[name].high for name in NAMES])
    rows = _Rows(observations)

    def residuals_at(logs: Floats) -> Floats:
        return np.asarray((rows.times(_constants(logs)) - rows.logs) / rows.noise)

    x = np.clip(_logs(start), low, high)
    residuals = residuals_at(x)
    cost = _cost(residuals, x, rows, centre, weights)
    damping = 1e-2
    for _ in range(_MAX_STEPS):
        normal, slope = _normal_equations(x, residuals, rows, centre, weights)
        accepted = False
        while not accepted and damping < 1e8:
            damped = normal + damping * np.diag(np.diag(normal))
            candidate = np.clip(x - np.linalg.solve(damped, slope), low, high)
            new_residuals = residuals_at(candidate)
            new_cost = _cost(new_residuals, candidate, rows, centre, weights)
            accepted = new_cost < cost
            damping = damping / 5 if accepted else damping * 4
        if not accepted:
            break
        gained = cost - new_cost
        x, residuals, cost = candidate, new_residuals, new_cost
        if gained < 1e-6 * (1 + cost):
            break
    normal, _ = _normal_equations(x, residuals, rows, centre, weights)
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


def _moved(logs: Floats, index: int, delta: float) -> Constants:
    moved = logs.copy()
    moved[index] += delta
    return _constants(moved)


class _Rows:
    """Observations as arrays; what equal descriptions have in common is computed once."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.logs = np.log([row.time_us for row in observations])
        scenarios: dict[Scenario, int] = {}
        steps: dict[tuple[int, Deployment], int] = {}
        self._parts: list[tuple[int, Callable[[Step], float]]] = []
        for row in observations:
            scenario = scenarios.setdefault(row.scenario, len(scenarios))
            step = steps.setdefault((scenario, row.deployment), len(steps))
            self._parts.append((step, STAGES[row.stage]))
        self._scenarios, self._steps = tuple(scenarios), tuple(steps)
        self.noise = np.asarray([row.noise for row in observations])
        self.weights = self._weights()
        self._all = range(len(self._steps))

    def _weights(self) -> Floats:
        """Repeated rows count as one, and the rows of a sweep as so many at most."""
        sweeps = [
            (self._steps[step][0], self._steps[step][1].with_batch(_LARGE), part)
            for step, part in self._parts
        ]
        repeats = Counter(self._parts)
        lengths: Counter[object] = Counter()
        for sweep, _ in set(zip(sweeps, self._parts, strict=True)):
            lengths[sweep] += 1
        counts = [
            repeats[row] * max(1.0, lengths[sweep] / _MOST_ROWS_OF_A_SWEEP)
            for row, sweep in zip(self._parts, sweeps, strict=True)
        ]
        return 1 / np.asarray(counts)

    def times(self, constants: Constants) -> Floats:
        """Logarithm of each row's predicted time."""
        steps = self._predicted(constants, self._all)
        return np.asarray([math.log(part(steps[step])) for step, part in self._parts])

    def jacobian(self, logs: Floats) -> Floats:
        """Of the rows' logarithms by those of the constants; a step reads not all of them."""
        base = self.times(_constants(logs))
        result = np.zeros((len(base), len(NAMES)))
        for index, (name, delta) in enumerate(zip(NAMES, _deltas(logs), strict=True)):
            readers = [step for step in self._all if reads(self._steps[step][1], name)]
            steps = self._predicted(_moved(logs, index, delta), readers)
            for row, (step, part) in enumerate(self._parts):
                if step in steps:
                    result[row, index] = (math.log(part(steps[step])) - base[row]) / delta
        return result

    def _predicted(self, constants: Constants, which: Sequence[int]) -> dict[int, Step]:
        scenarios = [scenario.with_constants(constants) for scenario in self._scenarios]
        found = {}
        for step in which:
            scenario, deployment = self._steps[step]
            found[step] = step_of(scenarios[scenario], deployment)
        return found


def _cost(residuals: Floats, logs: Floats, rows: _Rows, centre: Floats, weights: Floats) -> float:
    scale = _OUTLIER_SIGMAS**2
    losses = 2 * scale * (np.sqrt(1 + residuals**2 / scale) - 1)
    return float((rows.weights * losses).sum() + (weights * (logs - centre) ** 2).sum())


def _normal_equations(
    logs: Floats, residuals: Floats, rows: _Rows, centre: Floats, weights: Floats
) -> tuple[Floats, Floats]:
    trust = rows.weights / np.sqrt(1 + residuals**2 / _OUTLIER_SIGMAS**2)
    jacobian = rows.jacobian(logs) / rows.noise[:, None]
    normal = (jacobian * trust[:, None]).T @ jacobian + np.diag(weights)
    slope = (jacobian * trust[:, None]).T @ residuals + weights * (logs - centre)
    return normal, slope


def _deltas(logs: Floats) -> list[float]:
    """For differences; towards the inside where a constant is at its bound."""
    rooms = (math.log(PRIORS[name].high) - log for name, log in zip(NAMES, logs, strict=True))
    return [1e-4 if room > 1e-4 else -1e-4 for room in rooms]
