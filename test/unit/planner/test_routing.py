"""How tokens spread over experts."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.routing import Routing, routing_from_histogram, skewed_routing


def _draw(routing: Routing, tokens: int, rounds: int) -> np.ndarray:
    """Rows per expert, [rounds, experts]."""
    generator = np.random.default_rng(7)
    return generator.binomial(tokens, routing.probabilities, (rounds, len(routing.probabilities)))


@pytest.mark.parametrize("skew", [0.0, 0.4, 1.0])
def test_the_probabilities_add_up_to_the_experts_per_token(skew: float) -> None:
    routing = skewed_routing(128, 8, skew)

    assert routing.experts_per_token == pytest.approx(8, rel=1e-9)


def test_uniform_routing_gives_the_textbook_number_of_distinct_experts() -> None:
    distinct = skewed_routing(128, 8, 0.0).distinct_experts(12)

    assert distinct == pytest.approx(128 * (1 - (1 - 8 / 128) ** 12), rel=1e-9)


@pytest.mark.parametrize("tokens", [1, 28, 400])
def test_distinct_experts_agree_with_drawn_tokens(tokens: int) -> None:
    routing = skewed_routing(128, 8, 0.7)
    drawn = (_draw(routing, tokens, 4000) > 0).sum(axis=1).mean()

    assert routing.distinct_experts(tokens) == pytest.approx(drawn, rel=0.01)


@pytest.mark.parametrize("tokens", [28, 300, 1344, 20_000])
def test_rows_after_the_first_tile_agree_with_drawn_tokens(tokens: int) -> None:
    routing = skewed_routing(128, 8, 0.4)
    tiles = np.ceil(_draw(routing, tokens, 2000) / 32)
    drawn = np.maximum(tiles - 1, 0).sum(axis=1).mean() * 32

    padded = routing.rows_after_the_first_tile(tokens, 32)

    assert padded == pytest.approx(drawn, rel=0.05, abs=40)


def test_more_skew_hits_fewer_experts() -> None:
    hit = [skewed_routing(128, 8, skew).distinct_experts(20) for skew in (0.0, 0.3, 0.6, 1.0)]

    assert hit == sorted(hit, reverse=True)


def test_a_histogram_knows_its_hottest_rank() -> None:
    routing = routing_from_histogram([3, 3, 1, 1, 1, 1, 1, 1], experts_per_token=2)

    assert routing.hottest_rank(4) == pytest.approx(6 / 12 * 4)
    assert routing.hottest_rank(1) == pytest.approx(1)


@pytest.mark.parametrize("tokens", [1, 12, 100])
def test_the_experts_hit_on_the_hottest_rank_are_those_of_drawn_tokens(tokens: int) -> None:
    routing = routing_from_histogram([6.0] * 32 + [1.0] * 96, experts_per_token=8)
    hit = _draw(routing, tokens, 4000) > 0

    most = routing.most_hit_of_a_rank(tokens, 4)

    assert most == pytest.approx(hit.reshape(-1, 4, 32).sum(axis=2).mean(axis=0).max(), rel=0.02)


@pytest.mark.parametrize("skew", [0.0, 0.7])
def test_a_token_has_one_whole_expert_read_however_many_ranks_share_them(skew: float) -> None:
    routing = skewed_routing(128, 8, skew)

    most = [routing.most_hit_of_a_rank(1, ranks) for ranks in (1, 2, 8, 64, 128)]

    assert most == pytest.approx([8, 4, 1, 1, 1], rel=1e-6)


@pytest.mark.parametrize(("num_experts", "topk"), [(8, 8), (128, 127), (1, 1)])
def test_a_token_may_choose_all_experts(num_experts: int, topk: int) -> None:
    routing = skewed_routing(num_experts, topk, 0.5)

    assert routing.experts_per_token == pytest.approx(topk, rel=1e-6)
    assert routing.distinct_experts(1) == pytest.approx(topk, rel=1e-6)
    assert routing.distinct_experts(1000) == pytest.approx(num_experts, rel=1e-6)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1.0], "1 counts"),
        ([0.0] * 8, "not all 0"),
        ([-1.0] * 8, "0 or more"),
        ([9, 1, 0], "twice"),
    ],
)
def test_an_impossible_histogram_is_refused(counts: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        routing_from_histogram(counts, experts_per_token=2)
