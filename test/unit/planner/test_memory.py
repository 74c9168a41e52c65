"""Capacities that were published."""

from __future__ import annotations

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Deployment, Mode, Workload
from sglang_afd.planner.gpu import GIB, known_gpu
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.memory import largest_batch, plan_memory

QWEN = known_shape("Qwen3-235B-A22B-FP8")
GB200 = known_gpu("GB200 NVL72")
EIGHT_K = Workload(context_tokens=8192)


def _colocated(ranks: int, batch: int = 1) -> Deployment:
    return Deployment(
        mode=Mode.COLOCATED, attn_gpus=ranks, expert_parallel=ranks, batch_per_attn_gpu=batch
    )


def _afd(batch: int = 2) -> Deployment:
    return Deployment(
        mode=Mode.AFD,
        attn_gpus=28,
        mlp_gpus=4,
        expert_parallel=4,
        micro_batches=2,
        batch_per_attn_gpu=batch,
    )


@pytest.mark.parametrize(
    ("ranks", "published_tokens"),
    [(4, 571_968), (8, 726_960), (16, 799_920), (32, 837_056), (64, 855_632)],
)
def test_the_cache_of_vllm_is_predicted(ranks: int, published_tokens: int) -> None:
    plan = plan_memory(QWEN, GB200, EIGHT_K, _colocated(ranks))

    assert plan.roles[0].kv_capacity_tokens == pytest.approx(published_tokens, rel=0.02)


@pytest.mark.parametrize(
    ("ranks", "published_gib"), [(8, 35.58), (16, 22.26), (32, 15.6), (64, 12.27)]
)
def test_the_weights_of_vllm_are_predicted(ranks: int, published_gib: float) -> None:
    plan = plan_memory(QWEN, GB200, EIGHT_K, _colocated(ranks))

    assert plan.roles[0].weight_bytes / GIB == pytest.approx(published_gib, rel=0.04)


def test_the_cache_of_fastafd_is_predicted() -> None:
    plan = plan_memory(QWEN, GB200, EIGHT_K, _afd())

    published_tokens = 839_424
    assert plan.roles[0].kv_capacity_tokens == pytest.approx(published_tokens, rel=0.02)


def test_requests_that_fit_are_the_capacity_over_the_context() -> None:
    published = {2048: 395, 131_072: 6}  # at a capacity of 808,704 tokens

    for context, requests in published.items():
        assert int(808_704 / context) == pytest.approx(requests, abs=1)
        batch = largest_batch(QWEN, GB200, Workload(context_tokens=context), _afd())
        assert batch == pytest.approx(839_424 / context, rel=0.03, abs=1)


def test_weights_that_do_not_fit_are_refused() -> None:
    plan = plan_memory(QWEN, known_gpu("H100"), EIGHT_K, _colocated(2))

    with pytest.raises(ConfigError, match="raise the expert parallelism"):
        plan.require_fit(_colocated(2))


def test_nothing_fits_where_the_weights_do_not() -> None:
    assert largest_batch(QWEN, known_gpu("H100"), EIGHT_K, _colocated(2)) == 0


def test_a_batch_that_does_not_fit_is_refused_with_the_one_that_does() -> None:
    plan = plan_memory(QWEN, GB200, EIGHT_K, _colocated(4, batch=100))

    with pytest.raises(ConfigError, match="lower the batch to 70"):
        plan.require_fit(_colocated(4, batch=100))
