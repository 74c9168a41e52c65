"""Are the logits of both sides equal within a bound? Each row's difference, relative to the row."""

from __future__ import annotations

from typing import Any

import numpy as np

LEAST_AGREEMENT = 0.9  # share of rows with the same largest logit, which near ties may turn


def compare(
    colocated: np.ndarray[Any, Any], afd: np.ndarray[Any, Any], *, bound: float
) -> dict[str, Any]:
    """Of next-token logits [rows, vocabulary], teacher-forced.

    Args:
        colocated: The reference.
        afd: Of the split roles.
        bound: On the median over the rows of |difference| / |row|. Not on the largest: where two
            experts are nearly tied in a row, rounding chooses another, and that row differs by it.
    """
    if colocated.shape != afd.shape:
        raise ValueError(f"logits of {colocated.shape} and of {afd.shape} cannot be compared")
    reference, got = colocated.astype(np.float64), afd.astype(np.float64)
    difference = got - reference
    norms = np.linalg.norm(reference, axis=1)
    relative = np.linalg.norm(difference, axis=1) / np.maximum(norms, 1e-30)
    agreement = float((reference.argmax(axis=1) == got.argmax(axis=1)).mean())
    is_finite = bool(np.isfinite(reference).all() and np.isfinite(got).all())
    median = float(np.median(relative))
    return {
        "rows": int(reference.shape[0]),
        "max_abs": float(np.abs(difference).max()),
        "max_relative": float(relative.max()),
        "median_relative": median,
        "argmax_agreement": agreement,
        "bound": bound,
        "is_equal_within_bound": is_finite and median <= bound and agreement >= LEAST_AGREEMENT,
    }
