"""How tokens spread over experts: distinct experts hit, rows per expert, the hottest rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sglang_afd.errors import ConfigError

Floats = NDArray[np.float64]

_TILES_AROUND_THE_MEAN = 6


@dataclass(frozen=True)
class Routing:
    """Probability of each expert to be among the top-k of a token; they add up to k.

    `placed` tells whether neighbours in the tuple share a rank, as in a measured histogram; without
    a histogram the experts are taken to be placed so that no rank is hotter than the others.
    """

    probabilities: tuple[float, ...]
    placed: bool = False

    @property
    def experts_per_token(self) -> float:
        """k."""
        return float(sum(self.probabilities))

    def distinct_experts(self, tokens: float) -> float:
        """Expected number of experts that at least one of these tokens chose."""
        return _distinct_experts(self.probabilities, tokens)

    def most_hit_of_a_rank(self, tokens: float, num_ranks: int) -> float:
        """Expected number of experts that the rank with most of them reads.

        Somebody reads a whole one, however many ranks share the experts of a few tokens.
        """
        if self.placed:
            most = _most_distinct_of_a_rank(self.probabilities, tokens, num_ranks)
        else:
            most = self.distinct_experts(tokens) / num_ranks
        return max(most, min(self.distinct_experts(tokens), 1.0))

    def rows_after_the_first_tile(self, tokens: float, tile_rows: float) -> float:
        """Expected rows, padded to whole tiles, beyond the first tile of each expert that is hit.

        The rows of an expert are binomial; the normal curve stands in for it.
        """
        return _rows_after_the_first_tile(self.probabilities, tokens, tile_rows)

    def hottest_rank(self, num_ranks: int) -> float:
        """Rows of the most loaded rank, over the mean."""
        if not self.placed:
            return 1.0
        loads = [float(part.sum()) for part in np.array_split(_array(self), num_ranks)]
        return max(loads) * num_ranks / self.experts_per_token


@lru_cache(maxsize=4096)
def skewed_routing(num_experts: int, experts_per_token: int, skew: float) -> Routing:
    """Popularity falls as rank to the power of -skew (Zipf); 0 is uniform."""
    popularity = np.arange(1, num_experts + 1) ** -float(skew)
    popularity /= popularity.sum()
    rate = float(experts_per_token)
    for _ in range(60):  # Newton on: sum of 1 - exp(-rate * popularity) = k
        missed = np.exp(-rate * popularity)
        surplus = num_experts - float(missed.sum()) - experts_per_token
        if abs(surplus) < 1e-12 * num_experts:
            break
        rate -= surplus / max(float((popularity * missed).sum()), 1e-300)
    probabilities = np.minimum(-np.expm1(-rate * popularity), 1 - 1e-12)
    return Routing(tuple(float(p) for p in probabilities))


def routing_from_histogram(counts: Sequence[float], experts_per_token: int) -> Routing:
    """From how often each expert of a layer was chosen, in the order of their placement."""
    values = np.asarray(counts, dtype=np.float64)
    if values.ndim != 1 or values.size < experts_per_token:
        raise ConfigError(
            f"expert histogram: {values.size} counts for top-{experts_per_token}; "
            "wanted one count per expert"
        )
    if not np.all(np.isfinite(values)) or np.any(values < 0) or values.sum() <= 0:
        raise ConfigError("expert histogram: counts have to be numbers of 0 or more, not all 0")
    share = values / values.sum()
    if share.max() * experts_per_token > 1 + 1e-6:
        raise ConfigError(
            f"expert histogram: one expert has {share.max():.0%} of the choices, and a token "
            f"cannot choose it twice among {experts_per_token}; are the counts those of one layer?"
        )
    probabilities = np.minimum(share * experts_per_token, 1 - 1e-12)
    return Routing(tuple(float(p) for p in probabilities), placed=True)


def check_probabilities(probabilities: Sequence[float], experts_per_token: int) -> None:
    """Raises: ConfigError, when they are not those of the experts of a token."""
    total = math.fsum(probabilities) if all(0 <= p < 1 for p in probabilities) else math.nan
    if not abs(total - experts_per_token) <= 0.01 * experts_per_token:
        raise ConfigError(
            f"expert_probabilities: wanted one number of 0 or more and below 1 for each expert, "
            f"which add up to {experts_per_token}, the experts of a token"
        )


@lru_cache(maxsize=256)
def _cached_array(probabilities: tuple[float, ...]) -> Floats:
    return np.asarray(probabilities, dtype=np.float64)


def _array(routing: Routing) -> Floats:
    return _cached_array(routing.probabilities)


# Kept, since a fit asks for the same with one other constant at a time.
@lru_cache(maxsize=65536)
def _distinct_experts(probabilities: tuple[float, ...], tokens: float) -> float:
    p = _cached_array(probabilities)
    return float(np.sum(-np.expm1(tokens * np.log1p(-p))))


@lru_cache(maxsize=65536)
def _most_distinct_of_a_rank(
    probabilities: tuple[float, ...], tokens: float, num_ranks: int
) -> float:
    hit = -np.expm1(tokens * np.log1p(-_cached_array(probabilities)))
    return float(hit.reshape(num_ranks, -1).sum(axis=1).max())


@lru_cache(maxsize=65536)
def _rows_after_the_first_tile(
    probabilities: tuple[float, ...], tokens: float, tile_rows: float
) -> float:
    p = _cached_array(probabilities)
    mean = tokens * p
    deviation = np.sqrt(mean * (1 - p)) + 0.3
    certain = np.maximum(np.floor(mean / tile_rows) - _TILES_AROUND_THE_MEAN, 0)
    tiles = certain + np.arange(1, 2 * _TILES_AROUND_THE_MEAN + 2)[:, None]
    more = _normal_cdf((mean - tiles * tile_rows - 0.5) / deviation)
    return float(np.sum(certain + more.sum(axis=0)) * tile_rows)


def _normal_cdf(z: Floats) -> Floats:
    """Within 0.01 of the normal distribution function (Bowling et al. 2009)."""
    clipped = np.clip(z, -12, 12)
    return np.asarray(1 / (1 + np.exp(-clipped * (0.07056 * clipped * clipped + 1.5976))))
