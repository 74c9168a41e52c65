"""Are the logits of both sides equal within a bound? Each row's difference, relative to the row.

Rounding alone drives the logits of a deep model with random weights apart: it chooses another
expert here and there, and the next layers carry that on. In a simulation of 48 layers the order of
additions changed logits by 0.16 (8 layers: 0.006), one expert of 128 with a wrong sign by 0.31. So
stock SGLang is compared with itself, too, with the same prompts in a batch of another size, and a
deployment whose kernels see other numbers of rows may differ by somewhat more than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from step.cases import probed_rows

LEAST_AGREEMENT = 0.9  # share of rows with the same largest logit, which near ties may turn
OF_OWN = 1.5  # how many times what stock SGLang differs by from itself is allowed
LESS_AGREEMENT = 0.25  # than its own; of few rows, so by chance
MOST = 0.5  # beyond it nothing is told apart: unrelated logits differ by 1.4

Logits = np.ndarray[Any, Any]


def compare_servers(
    colocated: Mapping[int, Logits],
    servers: Sequence[Logits],
    num_rows: int,
    *,
    bound: float,
    rounds_as_stock: bool,
) -> dict[str, Any]:
    """Those of every attention server with those of stock SGLang.

    Args:
        colocated: By size of the batch, [steps, rows, vocabulary] of `probed_rows`; of `num_rows`
            and of half as many.
        servers: The same of each server, in a batch of `num_rows`.
        num_rows: Of each server.
        bound: See `compare`.
        rounds_as_stock: Then what stock SGLang differs by from itself is no excuse.

    Returns: What `compare` does of the server that is furthest off, with those of all and what
        stock SGLang differs by from itself.
    """
    own = _own_distance(colocated, num_rows)
    allowed = None if rounds_as_stock else own
    found = [
        compare(_flat(colocated[num_rows]), _flat(server), bound=bound, own=allowed)
        for server in servers
    ]
    worst = max(found, key=lambda one: (not one["is_equal_within_bound"], one["median_relative"]))
    by_server = [one["median_relative"] for one in found]
    return worst | {"batch": num_rows, "median_relative_of_servers": by_server, "stock_apart": own}


def _own_distance(colocated: Mapping[int, Logits], num_rows: int) -> dict[str, Any] | None:
    half = max(1, num_rows // 2)
    if half == num_rows or half not in colocated:
        return None
    in_whole, in_half = probed_rows(num_rows), probed_rows(half)
    both = [row for row in in_whole if row in in_half]
    whole = colocated[num_rows][:, [in_whole.index(row) for row in both]]
    part = colocated[half][:, [in_half.index(row) for row in both]]
    apart = compare(_flat(whole), _flat(part), bound=float("inf"))
    return {name: apart[name] for name in ("rows", "median_relative", "argmax_agreement")}


def _flat(logits: Logits) -> Logits:
    flat: Logits = logits.reshape(-1, logits.shape[-1])
    return flat


def compare(
    colocated: Logits, afd: Logits, *, bound: float, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Of next-token logits [rows, vocabulary], teacher-forced.

    Args:
        colocated: The reference.
        afd: Of the split roles.
        bound: On the median over the rows of |difference| / |row|. Not on the largest: where two
            experts are nearly tied in a row, rounding chooses another, and that row differs by it.
        own: The same of stock SGLang and itself, which widens the bounds.
    """
    least_agreement = LEAST_AGREEMENT
    if own is not None:
        bound = max(bound, min(MOST, OF_OWN * own["median_relative"]))
        least_agreement = min(least_agreement, own["argmax_agreement"] - LESS_AGREEMENT)
    if colocated.shape != afd.shape:
        raise ValueError(f"logits of {colocated.shape} and of {afd.shape} cannot be compared")
    difference = afd - colocated
    norms = np.linalg.norm(colocated, axis=1)
    relative = np.linalg.norm(difference, axis=1) / np.maximum(norms, 1e-30)
    agreement = float((colocated.argmax(axis=1) == afd.argmax(axis=1)).mean())
    is_finite = bool(np.isfinite(colocated).all() and np.isfinite(afd).all())
    median = float(np.median(relative))
    return {
        "rows": int(colocated.shape[0]),
        "max_abs": float(np.abs(difference).max()),
        "max_relative": float(relative.max()),
        "median_relative": median,
        "argmax_agreement": agreement,
        "bound": bound,
        "is_equal_within_bound": is_finite and median <= bound and agreement >= least_agreement,
    }
