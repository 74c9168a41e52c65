"""Properties that any prediction has, near the measurements and far from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from sglang_afd.errors import ConfigError
from sglang_afd.planner.constants import DEFAULTS, NAMES, PRIORS
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode, Workload
from sglang_afd.planner.gpu import GPUS, Gpu
from sglang_afd.planner.known_models import CONFIGS, known_shape
from sglang_afd.planner.pipeline import ATTENTION, MLP
from sglang_afd.planner.predict import Prediction, predict
from sglang_afd.planner.routing import routing_from_histogram
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.speedup import speed_up

QWEN = known_shape("Qwen3-235B-A22B-FP8")
GB200 = GPUS["GB200"]

contexts = some.integers(512, 131_072)
batches = some.integers(4, 512)
ratios = some.integers(1, 20)
micro_batches = some.integers(1, 4)
modes = some.sampled_from([Mode.AFD, Mode.CORE_ONLY])
kernels = some.sampled_from(ExpertKernels)


def _scenario(context: float = 8192, **changes: object) -> Scenario:
    scenario = Scenario(shape=QWEN, gpu=GB200, workload=Workload(context_tokens=context))
    return replace(scenario, **changes)  # type: ignore[arg-type]


def _afd(ratio: int = 7, batch: int = 96, m: int = 2, **changes: object) -> Deployment:
    deployment = Deployment(
        mode=Mode.AFD,
        attn_gpus=4 * ratio,
        mlp_gpus=4,
        expert_parallel=4,
        micro_batches=m,
        batch_per_attn_gpu=batch,
    )
    return replace(deployment, **changes)  # type: ignore[arg-type]


def _colocated(ranks: int = 16, batch: int = 96) -> Deployment:
    return Deployment(
        mode=Mode.COLOCATED, attn_gpus=ranks, expert_parallel=ranks, batch_per_attn_gpu=batch
    )


@settings(max_examples=60, deadline=None)
@given(context=contexts, batch=batches, ratio=ratios, m=micro_batches)
def test_the_three_factors_multiply_to_the_speed_up(
    context: int, batch: int, ratio: int, m: int
) -> None:
    result = speed_up(_scenario(context), _colocated(), _afd(ratio, batch, m))

    product = result.batch_gain * result.overlap_gain * result.disaggregation_cost
    assert product == pytest.approx(result.total, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(context=contexts, batch=batches, ratio=ratios, m=micro_batches, mode=modes, kind=kernels)
def test_a_step_grows_with_context_batch_and_ratio(
    context: int, batch: int, ratio: int, m: int, mode: Mode, kind: ExpertKernels
) -> None:
    deployment = _afd(ratio, batch, m, mode=mode, expert_kernels=kind)
    step_us = predict(_scenario(context), deployment).step_us

    longer = predict(_scenario(context * 2), deployment).step_us
    larger = predict(_scenario(context), deployment.with_batch(batch + 8)).step_us
    wider = _afd(ratio + 1, batch, m, mode=mode, expert_kernels=kind)

    assert longer >= step_us
    assert larger >= step_us
    assert predict(_scenario(context), wider).step_us >= step_us * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    context=contexts,
    batch=batches,
    mode=some.sampled_from(Mode),
    field=some.sampled_from(["hbm_bytes_per_us", "link_bytes_per_us", "fp8_flops_per_us"]),
)
def test_a_faster_gpu_never_gives_a_slower_step(
    context: int, batch: int, mode: Mode, field: str
) -> None:
    colocated = mode is Mode.COLOCATED
    deployment = _colocated(batch=batch) if colocated else _afd(7, batch, mode=mode)
    slow = predict(_scenario(context), deployment).step_us
    faster: Gpu = replace(GB200, **{field: 1.5 * getattr(GB200, field)})

    fast = predict(_scenario(context, gpu=faster), deployment).step_us

    assert fast <= slow * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(name=some.sampled_from(NAMES), factor=some.floats(1.01, 1.5), mode=some.sampled_from(Mode))
def test_a_constant_moves_the_step_the_way_its_name_says(
    name: str, factor: float, mode: Mode
) -> None:
    deployment = _colocated() if mode is Mode.COLOCATED else _afd(mode=mode)
    before = predict(_scenario(), deployment).step_us
    constants = DEFAULTS.scaled(**{name: factor})

    after = predict(_scenario(constants=constants), deployment).step_us

    if name.endswith("_efficiency"):
        assert after <= before
    elif name.endswith("_us"):
        assert after >= before


@pytest.mark.parametrize("model", [*CONFIGS, "Qwen3-30B-A3B-FP8"])
@pytest.mark.parametrize("gpu", list(GPUS))
def test_every_known_model_gives_a_sane_step_on_every_gpu(model: str, gpu: str) -> None:
    shape = known_shape(model)
    scenario = Scenario(shape=shape, gpu=GPUS[gpu], workload=Workload(context_tokens=4096))
    deployment = _afd(3, 32, mlp_gpus=16, attn_gpus=48, expert_parallel=16)

    prediction = predict(scenario, deployment)

    floor_us = shape.all_dense_bytes / GPUS[gpu].hbm_bytes_per_us
    assert floor_us < prediction.step_us < 200_000


def test_the_binding_stage_changes_from_attention_to_mlp_with_the_ratio() -> None:
    binding = [predict(_scenario(), _afd(ratio)).binding for ratio in (1, 3, 20)]

    assert binding[0] == ATTENTION
    assert binding[-1] == MLP


def test_the_sign_of_the_speed_up_flips_with_the_ratio() -> None:
    totals = [speed_up(_scenario(), _colocated(), _afd(ratio)).total for ratio in (1, 6, 20)]

    assert totals[0] < 1 < totals[1]
    assert totals[2] < 1


def test_one_micro_batch_hides_nothing() -> None:
    prediction = predict(_scenario(), _afd(m=1))

    stages = prediction.stages
    serial = QWEN.num_layers * (stages.attn_us + stages.mlp_us + 2 * stages.exchange_us)
    assert prediction.step_us - prediction.outside_layers_us == pytest.approx(serial)


def test_an_uneven_split_reads_no_request_twice() -> None:
    even, uneven = (predict(_scenario(131_072), _afd(1, 6, m)).stages.core_us * m for m in (2, 4))

    fixed = DEFAULTS.core_fixed_us
    assert uneven - 4 * fixed == pytest.approx(even - 2 * fixed)


def test_verifying_more_tokens_reads_the_same_cache() -> None:
    def verify(tokens: int) -> Prediction:
        workload = Workload(context_tokens=8192, verify_tokens=tokens)
        return predict(_scenario(workload=workload), _afd())

    assert verify(4).stages.core_us == pytest.approx(verify(1).stages.core_us)
    assert verify(4).stages.mlp_us > 1.5 * verify(1).stages.mlp_us


def test_unequal_contexts_slow_the_slowest_peer() -> None:
    spread = Workload(context_tokens=8192, context_std_tokens=4096)

    unequal = predict(_scenario(workload=spread), _afd(3))

    assert unequal.step_us > 1.02 * predict(_scenario(), _afd(3)).step_us


def _jitter(share: float, deployment: Deployment, **changes: object) -> Prediction:
    return predict(_scenario(jitter=share, **changes), deployment)


@settings(max_examples=40, deadline=None)
@given(
    context=contexts,
    batch=batches,
    ratio=ratios,
    m=some.integers(1, 2),
    share=some.floats(0.001, 0.1),
    mode=some.sampled_from(Mode),
)
def test_more_jitter_never_gives_a_shorter_step(
    context: int, batch: int, ratio: int, m: int, share: float, mode: Mode
) -> None:
    colocated = mode is Mode.COLOCATED
    deployment = _colocated(batch=batch) if colocated else _afd(ratio, batch, m, mode=mode)

    quiet, some_us, more_us = (
        _jitter(each, deployment, workload=Workload(context_tokens=context)).step_us
        for each in (0.0, share, 2 * share)
    )

    assert quiet <= some_us <= more_us


def test_jitter_makes_a_colocated_step_wait_for_its_slowest_rank() -> None:
    quiet, noisy = _jitter(0.0, _colocated(16)), _jitter(0.05, _colocated(16))

    waits_us = 0.05 * quiet.stages.attn_us * 1.766  # E[max] of 16 standard normal variables
    assert noisy.step_us - quiet.step_us == pytest.approx(QWEN.num_layers * waits_us, rel=1e-3)


def test_nobody_waits_for_the_jitter_of_one_gpu() -> None:
    alone = _colocated(1, 32)

    assert _jitter(0.2, alone).step_us == pytest.approx(_jitter(0.0, alone).step_us, rel=1e-6)


def test_jitter_and_unequal_contexts_add_up_as_squares() -> None:
    spread = Workload(context_tokens=8192, context_std_tokens=4096)
    equal, unequal, noisy, both = (
        _jitter(share, _afd(3), workload=workload).stages
        for share, workload in (
            (0.0, Workload(context_tokens=8192)),
            (0.0, spread),
            (0.1, Workload(context_tokens=8192)),
            (0.1, spread),
        )
    )

    by_contexts = unequal.attn_us - equal.attn_us
    together = both.attn_us + both.wait_us - equal.attn_us
    assert together**2 == pytest.approx(by_contexts**2 + noisy.wait_us**2)


@pytest.mark.parametrize(
    ("share", "m", "message"),
    [(5, 2, "5 % is 0.05"), (-0.1, 2, "0 or more"), (0.1, 3, "1 and 2 micro-batches only")],
)
def test_jitter_beyond_what_is_known_is_refused(share: float, m: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _jitter(share, _afd(m=m))


def test_a_hot_rank_slows_the_experts() -> None:
    counts = [2.0] * 32 + [1.0] * 96
    hot = routing_from_histogram(counts, QWEN.experts_per_token)
    even = routing_from_histogram([1.0] * 128, QWEN.experts_per_token)

    slow, fast = (predict(_scenario(routing=r), _afd()).stages.mlp_us for r in (hot, even))

    assert slow > 1.2 * fast


def test_a_system_that_cuts_its_batch_reads_the_experts_twice() -> None:
    scenario = _scenario(1024, colocated_piece_tokens=256)
    one, two = (predict(scenario, _colocated(batch=batch)).stages for batch in (256, 257))

    assert two.experts.fixed_us == 2 * one.experts.fixed_us
    assert two.experts.weights_us > 1.3 * one.experts.weights_us
    assert two.core_us < 1.01 * one.core_us


def test_a_system_that_does_not_cut_its_batch_reads_the_experts_once() -> None:
    one, two = (predict(_scenario(1024), _colocated(batch=batch)).stages for batch in (256, 512))

    assert two.experts.fixed_us == one.experts.fixed_us
    assert two.experts.weights_us < 1.01 * one.experts.weights_us
    assert two.exchange_us < 2 * one.exchange_us


@given(batch=some.integers(257, 2000), piece=some.integers(1, 256))
def test_a_colocated_step_is_never_shorter_in_pieces(batch: int, piece: int) -> None:
    whole, cut = (
        predict(_scenario(1024, colocated_piece_tokens=tokens), _colocated(batch=batch)).step_us
        for tokens in (None, piece)
    )

    assert cut > whole


def test_pieces_change_no_disaggregated_deployment() -> None:
    for kind in ExpertKernels:
        deployment = _afd(batch=512, expert_kernels=kind)
        whole, cut = (
            predict(_scenario(1024, colocated_piece_tokens=tokens), deployment)
            for tokens in (None, 256)
        )

        assert cut == whole


@pytest.mark.parametrize("tokens", [0, -256, 2.5])
def test_impossible_pieces_are_refused(tokens: float) -> None:
    with pytest.raises(ConfigError, match="colocated_piece_tokens"):
        _scenario(colocated_piece_tokens=tokens)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not divide among 3 GPUs"):
        predict(_scenario(), _afd(mlp_gpus=3, expert_parallel=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_gpus": 0}, "attn_gpus is 0"),
        ({"mlp_gpus": -4}, "mlp_gpus is -4"),
        ({"mlp_gpus": 6}, "copies of the experts"),
        ({"micro_batches": 200}, "at least one"),
        ({"batch_per_attn_gpu": 1.5}, "whole number"),
        ({"batch_per_attn_gpu": 10**400}, "beyond 1e308"),
        ({"mode": Mode.COLOCATED}, "no MLP GPUs"),
    ],
)
def test_an_impossible_deployment_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _afd(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_tokens": 0}, "above 0"),
        ({"context_tokens": float("nan")}, "above 0"),
        ({"max_tpot_us": 50}, "another unit"),  # 50 ms
        ({"accepted_tokens": 2}, "accepted"),
        ({"accepted_tokens": 0.5}, "a step yields one"),
        ({"verify_tokens": 10**400}, "beyond 1e308"),
    ],
)
def test_an_impossible_workload_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**{"context_tokens": 8192, **changes})  # type: ignore[arg-type]


def test_a_bandwidth_in_another_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="another unit"):
        replace(GB200, hbm_bytes_per_us=8e12)


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_outside_physics_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(DEFAULTS, **{name: PRIORS[name].high * 1.1})


def test_every_constant_names_its_source() -> None:
    assert all(len(prior.source) > 20 for prior in PRIORS.values())
