"""Fits on the rows of one context, predicts all others, and compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_afd.errors import ConfigError
from sglang_afd.planner.description import Row
from sglang_afd.planner.fit import Fit, Observation, fit
from sglang_afd.planner.predict import predict
from sglang_afd.planner.records import MeasuredRow


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row that the fit has not seen."""

    row: Row
    predicted_us: float
    measured_us: float

    @property
    def error_pct(self) -> float:
        """Signed: above 0 the prediction is too slow."""
        return 100 * (self.predicted_us / self.measured_us - 1)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Of absolute errors, but for the worst, which keeps its sign."""

    rows: int
    median_abs_pct: float
    p90_abs_pct: float
    worst_pct: float
    mean_pct: float


def split(
    rows: Sequence[MeasuredRow], context_tokens: float
) -> tuple[list[Observation], list[Row]]:
    """Rows of this context with their results, the others without.

    Raises: ConfigError, when no row has this context.
    """
    seen, unseen = [], []
    for measured in rows:
        row = measured.row
        if row.scenario.workload.context_tokens == context_tokens:
            seen.append(measured.observation)
        else:
            unseen.append(row)
    contexts = sorted({item.row.scenario.workload.context_tokens for item in rows})
    if not seen:
        raise ConfigError(
            f"fit context {context_tokens:g}: the file has measured rows at "
            f"{', '.join(f'{value:g}' for value in contexts)}; choose one of them"
        )
    return seen, unseen


def predict_rows(fitted: Fit, rows: Sequence[Row]) -> list[float]:
    """Step times in us; reads descriptions only."""
    return [
        predict(row.scenario.with_constants(fitted.constants), row.deployment).step_us
        for row in rows
    ]


def fit_and_compare(
    rows: Sequence[MeasuredRow], context_tokens: float
) -> tuple[Fit, list[Compared]]:
    """The measured values of the predicted rows come in after all predictions are made."""
    observations, unseen = split(rows, context_tokens)
    fitted = fit(observations)
    predicted = predict_rows(fitted, unseen)
    results = [
        measured.step_us
        for measured in rows
        if measured.row.scenario.workload.context_tokens != context_tokens
    ]
    return fitted, [
        Compared(row=row, predicted_us=guess, measured_us=result)
        for row, guess, result in zip(unseen, predicted, results, strict=True)
    ]


def leave_out(
    rows: Sequence[MeasuredRow], group: Callable[[Row], str]
) -> dict[str, list[Compared]]:
    """Predicts each group of rows from a fit on all other groups; groups in order of appearance."""
    names = list(dict.fromkeys(group(item.row) for item in rows))
    results = {}
    for name in names:
        held_out = [item for item in rows if group(item.row) == name]
        fitted = fit([item.observation for item in rows if group(item.row) != name])
        predicted = predict_rows(fitted, [item.row for item in held_out])
        results[name] = [
            Compared(row=item.row, predicted_us=guess, measured_us=item.step_us)
            for item, guess in zip(held_out, predicted, strict=True)
        ]
    return results


def summarize(compared: Sequence[Compared]) -> Summary:
    """Over at least one row."""
    errors = np.asarray([item.error_pct for item in compared])
    return Summary(
        rows=len(compared),
        median_abs_pct=float(np.median(np.abs(errors))),
        p90_abs_pct=float(np.percentile(np.abs(errors), 90)),
        worst_pct=float(errors[np.abs(errors).argmax()]),
        mean_pct=float(errors.mean()),
    )
