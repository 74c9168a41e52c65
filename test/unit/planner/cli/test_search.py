"""The search finds what trying everything finds, and keeps memory and limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from planner_cases import site

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.search import (
    Space,
    front,
    search,
    search_colocated,
    search_disaggregated,
)
from sglang_afd.planner.site import Site


def _everything(where: Site, space: Space, step: int) -> list[Prediction]:
    """Every ratio, width and number of micro-batches, with batches of so many apart."""
    limit = where.scenario.workload.max_tpot_us
    found = []
    for width, micro_batches in product(space.widths(where.scenario.shape), space.micro_batches):
        for attn_gpus in range(1, space.max_gpus - width + 1):
            deployment = Deployment(
                mode=Mode.AFD,
                attn_gpus=attn_gpus,
                mlp_gpus=width,
                expert_parallel=width,
                micro_batches=micro_batches,
                batch_per_attn_gpu=micro_batches,
                expert_kernels=space.expert_kernels,
            )
            most = where.room(deployment)
            for batch in {*range(micro_batches, most + 1, step), most} - {0}:
                if batch < micro_batches:
                    continue
                point = where.predict(deployment.with_batch(batch))
                if limit is None or point.tpot_us <= limit:
                    found.append(point)
    return found


@pytest.mark.parametrize("limit", [None, 15_000.0, 25_000.0])
@pytest.mark.parametrize("kernels", list(ExpertKernels))
def test_the_best_ratio_is_that_of_trying_everything(
    limit: float | None, kernels: ExpertKernels
) -> None:
    where = site(max_tpot_us=limit)
    space = Space(max_gpus=8, expert_kernels=kernels)

    found = search_disaggregated(where, space).best

    best = max(_everything(where, space, step=7), key=where.value)
    assert found is not None
    assert where.value(found) >= where.value(best) * (1 - 1e-9)


def test_the_best_of_many_gpus_is_that_of_trying_every_ratio() -> None:
    where = site("Qwen3-235B-A22B-FP8", GPUS["GB200"], 8192)
    space = Space(max_gpus=72, micro_batches=(2,), expert_parallel=(4, 8))

    found = search_disaggregated(where, space).best

    best = max(_everything(where, space, step=1000), key=where.value)
    assert found is not None
    assert where.value(found) >= where.value(best) * (1 - 1e-4)


@pytest.mark.parametrize("limit", [None, 20_000.0])
def test_the_best_colocated_deployment_is_that_of_trying_everything(limit: float | None) -> None:
    where = site(max_tpot_us=limit)

    found = search_colocated(where, Space(max_gpus=8)).best

    values = []
    for width in (1, 2, 4, 8):
        deployment = Deployment(
            mode=Mode.COLOCATED, attn_gpus=width, expert_parallel=width, batch_per_attn_gpu=1
        )
        for batch in range(1, where.room(deployment) + 1):
            point = where.predict(deployment.with_batch(batch))
            if limit is None or point.tpot_us <= limit:
                values.append(where.value(point))
    assert found is not None
    assert where.value(found) == pytest.approx(max(values), rel=1e-9)


@pytest.mark.parametrize("piece_tokens", [None, 100])
def test_the_best_batch_is_that_of_trying_every_one_in_pieces_or_whole(
    piece_tokens: int | None,
) -> None:
    plain = site(context=1024)
    where = Site(scenario=replace(plain.scenario, colocated_piece_tokens=piece_tokens))
    deployment = Deployment(
        mode=Mode.COLOCATED, attn_gpus=4, expert_parallel=4, batch_per_attn_gpu=1
    )

    found = search_colocated(where, Space(max_gpus=4, expert_parallel=(4,))).best

    batches = range(1, where.room(deployment) + 1)
    best = max((where.predict(deployment.with_batch(batch)) for batch in batches), key=where.value)
    assert found is not None
    assert where.value(found) == pytest.approx(where.value(best), rel=1e-9)


@pytest.mark.parametrize(("piece_tokens", "verify_tokens"), [(256, 1), (256, 3), (2, 3), (7, 1)])
def test_a_search_in_pieces_tries_few_batches_and_the_best_of_them(
    piece_tokens: int, verify_tokens: int
) -> None:
    plain = site(context=512, verify_tokens=verify_tokens)
    where = Site(scenario=replace(plain.scenario, colocated_piece_tokens=piece_tokens))
    deployment = Deployment(
        mode=Mode.COLOCATED, attn_gpus=8, expert_parallel=8, batch_per_attn_gpu=1
    )

    found = search_colocated(where, Space(max_gpus=8, expert_parallel=(8,)))

    batches = range(1, where.room(deployment) + 1)
    best = max((where.predict(deployment.with_batch(batch)) for batch in batches), key=where.value)
    assert found.best is not None
    assert where.value(found.best) == pytest.approx(where.value(best), rel=1e-9)
    assert found.num_predicted < 20


@pytest.mark.parametrize("limit", [None, 60_000.0])
def test_the_best_batch_leaves_no_micro_batch_short(limit: float | None) -> None:
    """19 requests in 3 micro-batches take 7 rows each, and 18 take 6."""
    where = site("Qwen3-235B-A22B", GPUS["GB300"], 65_536, max_tpot_us=limit)
    space = Space(max_gpus=4, micro_batches=(3,), expert_parallel=(2,))
    space = replace(space, expert_kernels=ExpertKernels.FUSED)

    found = search_disaggregated(where, space).best

    best = max(_everything(where, space, step=1), key=where.value)
    assert best.deployment.batch_per_attn_gpu % 3 == 0
    assert found is not None
    assert where.value(found) == pytest.approx(where.value(best), rel=1e-9)


def test_the_last_deployment_inside_the_link_domain_is_tried() -> None:
    where = site("Qwen3-235B-A22B-FP8", GPUS["GB200"], 8192)

    tried = search_disaggregated(where, Space(max_gpus=500, expert_parallel=(4,))).tried

    assert 72 in {point.deployment.total_gpus for point in tried}


@pytest.mark.parametrize(("jitter", "expected"), [(0.05, {1, 2, 3, 4}), (0.06, {1, 2})])
def test_only_micro_batches_whose_jitter_is_known_are_tried(
    jitter: float, expected: set[int]
) -> None:
    where = Site(scenario=replace(site().scenario, jitter=jitter))

    tried = search_disaggregated(where, Space(max_gpus=4)).tried

    assert {point.deployment.micro_batches for point in tried} == expected


def test_experts_that_cost_nothing_do_not_hide_a_late_gpu() -> None:
    deployment = Deployment(
        mode=Mode.AFD,
        attn_gpus=4,
        mlp_gpus=1,
        expert_parallel=1,
        micro_batches=1,
        batch_per_attn_gpu=64,
    )
    quiet, noisy = (
        Site(scenario=replace(site().scenario, jitter=jitter), has_free_experts=True)
        for jitter in (0.0, 0.1)
    )

    assert noisy.predict(deployment).step_us > 1.05 * quiet.predict(deployment).step_us


def test_a_search_of_nothing_but_unknown_micro_batches_is_refused() -> None:
    where = Site(scenario=replace(site().scenario, jitter=0.1))

    with pytest.raises(ConfigError, match="allow 1 or 2"):
        search_disaggregated(where, Space(max_gpus=4, micro_batches=(3,)))


@settings(max_examples=15)
@given(
    context=some.integers(1024, 65_536),
    limit=some.sampled_from([None, 20_000.0, 50_000.0]),
    max_gpus=some.integers(2, 12),
)
def test_what_is_found_fits_and_keeps_the_limit(
    context: int, limit: float | None, max_gpus: int
) -> None:
    where = site(context=context, max_tpot_us=limit)

    found = search(where, Space(max_gpus=max_gpus))

    for side in (found.colocated, found.disaggregated):
        assert all(point.memory.fits for point in side.tried)
        assert all(point.deployment.total_gpus <= max_gpus for point in side.tried)
        if side.best is not None and limit is not None:
            assert side.best.tpot_us <= limit


def test_nothing_on_a_front_is_beaten_and_nothing_better_is_left_out() -> None:
    points = search_disaggregated(site(), Space(max_gpus=8)).tried

    kept = front(points)

    for point in points:
        assert any(
            other.tpot_us <= point.tpot_us
            and other.tokens_per_s_per_gpu >= point.tokens_per_s_per_gpu
            for other in kept
        )
    for one, next_one in zip(kept, kept[1:], strict=False):
        assert one.tpot_us < next_one.tpot_us
        assert one.tokens_per_s_per_gpu < next_one.tokens_per_s_per_gpu


def test_one_gpu_has_no_disaggregated_deployment() -> None:
    found = search(site(), Space(max_gpus=1))

    assert found.disaggregated.best is None
    assert found.colocated.best is not None


def test_a_model_that_only_fits_apart_has_no_colocated_deployment() -> None:
    where = site("DeepSeek-V3", GPUS["H200"], context=60_000)

    found = search(where, Space(max_gpus=20, expert_parallel=(4, 8)))

    assert found.disaggregated.best is not None


def test_nothing_that_fits_is_an_error_that_says_what_is_short() -> None:
    with pytest.raises(ConfigError, match="does not fit on up to 2 H100"):
        search(site("DeepSeek-V3", GPUS["H100"]), Space(max_gpus=2))


def test_the_sign_of_the_speed_up_flips_with_the_ratio() -> None:
    where = site("Qwen3-235B-A22B-FP8", GPUS["GB200"], 8192)
    base = search_colocated(where, Space(max_gpus=72)).best
    best = search_disaggregated(where, Space(max_gpus=72)).best
    assert base is not None
    assert best is not None

    def speed_up(attn_gpus: int) -> float:
        deployment = Deployment(
            mode=Mode.AFD,
            attn_gpus=attn_gpus,
            mlp_gpus=best.deployment.mlp_gpus,
            expert_parallel=best.deployment.mlp_gpus,
            micro_batches=2,
            batch_per_attn_gpu=best.deployment.batch_per_attn_gpu,
            expert_kernels=best.deployment.expert_kernels,
        )
        return where.value(where.predict(deployment)) / where.value(base)

    assert speed_up(best.deployment.mlp_gpus) < 1 < speed_up(best.deployment.attn_gpus)
