"""What was measured becomes a profile whose fit gives the measurements back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.constants import DEFAULTS, Constants
from sglang_afd.planner.deployment import Workload
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.predict import predict
from sglang_afd.planner.profile import Profile, profile_text
from sglang_afd.planner.profiling import assemble, report
from sglang_afd.planner.profiling.case_times import CaseTimes
from sglang_afd.planner.profiling.cases import GPU_CASES, Case, parse_cases
from sglang_afd.planner.profiling.kernels import CORE, DENSE, EXCHANGE, EXPERTS, OUTSIDE
from sglang_afd.planner.profiling.timeline import UNMATCHED, StepTimes
from sglang_afd.planner.routing import skewed_routing
from sglang_afd.planner.samples import ExpertSample, MemoryUse, one_gpu
from sglang_afd.planner.scenario import Scenario

SHAPE = known_shape("Qwen3-30B-A3B")
EVEN = skewed_routing(SHAPE.num_experts, SHAPE.experts_per_token, 0.05)
# Unlike the priors, as another system's kernels are.
TRUTH = replace(
    DEFAULTS,
    kv_read_efficiency=0.8,
    weight_read_efficiency=0.97,
    core_fixed_us=9.0,
    colocated_dense_fixed_us=30.0,
    colocated_expert_fixed_us=20.0,
    colocated_step_fixed_us=900.0,
)
MEMORY = MemoryUse(
    total_bytes=150e9,
    weight_bytes=SHAPE.all_dense_bytes + SHAPE.all_expert_bytes,
    kv_bytes_per_token=SHAPE.kv_bytes_per_token,
    kv_pool_tokens=300_000,
    other_bytes=0.0,
)


def case_times(case: Case, truth: Constants = TRUTH, fault: float = 1.0) -> CaseTimes:
    """What a machine with these constants would measure, within 1 %."""
    noise = random.Random(case.name)
    workload = Workload(context_tokens=case.context)
    scenario = Scenario(
        shape=SHAPE, gpu=GPUS["H200"], workload=workload, constants=truth, routing=EVEN
    )
    found = predict(scenario, one_gpu(case.batch))
    stages = {
        CORE: found.stages.core_us * SHAPE.num_layers * fault,
        DENSE: found.stages.dense_us * SHAPE.num_layers * fault,
        EXPERTS: found.stages.experts.total_us * SHAPE.num_layers * fault,
        EXCHANGE: 0.0,
        OUTSIDE: found.outside_layers_us * fault,
    }
    return CaseTimes(
        case=case,
        step_context=case.context,
        stage_context=case.context,
        block_medians_us=[found.step_us * fault * noise.uniform(0.99, 1.01) for _ in range(3)],
        alone_us=[found.step_us + 1500],
        stages=[
            StepTimes(
                stages_us={k: v * noise.uniform(0.99, 1.01) for k, v in stages.items()},
                by_kernel_us={},
            )
            for _ in range(5)
        ],
    )


def profile_of(cases: list[CaseTimes], samples: tuple[ExpertSample, ...] = ()) -> Profile:
    return Profile(
        shape=SHAPE,
        gpu=GPUS["H200"],
        measurements=assemble.measurements(SHAPE, cases),
        expert_probabilities=EVEN.probabilities,
        provenance={"clock": "none"},
        expert_samples=samples,
        steps=assemble.step_samples(cases),
        memory=MEMORY,
    )


def worst_error(profile: Profile, truth: dict[str, float]) -> float:
    """Of the steps, predicted with the profile's own constants, against what really is."""
    constants = profile.fitted().constants
    errors = []
    for row in profile.measurements:
        if row.stage == "step":
            scenario = profile.scenario(row.workload).with_constants(constants)
            name = f"{row.deployment.batch_per_attn_gpu}x{row.workload.context_tokens:.0f}"
            errors.append(predict(scenario, row.deployment).step_us / truth[name] - 1)
    return max(map(abs, errors))


CASES = parse_cases(GPU_CASES)
STEPS_US = {case.name: case_times(case).step_us for case in CASES}


def test_the_measured_steps_are_predicted_from_their_own_profile() -> None:
    profile = profile_of([case_times(case) for case in CASES])

    assert worst_error(profile, STEPS_US) < 0.03


def test_times_that_are_off_by_a_factor_of_two_are_not_predicted_back() -> None:
    profile = profile_of([case_times(case, fault=2) for case in CASES[::3]])

    assert worst_error(profile, STEPS_US) > 0.3


def test_the_constants_of_the_machine_are_found() -> None:
    constants = profile_of([case_times(case) for case in CASES]).fitted().constants

    for name in ("kv_read_efficiency", "weight_read_efficiency", "colocated_dense_fixed_us"):
        assert getattr(constants, name) == pytest.approx(getattr(TRUTH, name), rel=0.06), name


def test_other_steps_than_the_measured_ones_are_predicted() -> None:
    profile = profile_of([case_times(case) for case in CASES])
    truth = case_times(Case(batch=96, context=3000)).step_us
    scenario = profile.scenario(Workload(context_tokens=3000))

    guess = predict(scenario.with_constants(profile.fitted().constants), one_gpu(96)).step_us

    assert guess == pytest.approx(truth, rel=0.03)


def test_calls_of_the_experts_tell_reading_from_arithmetic() -> None:
    few = profile_of([case_times(Case(batch=b, context=1024)) for b in (64, 128)])
    truth = replace(TRUTH, colocated_expert_flops_efficiency=0.5)
    samples = tuple(expert_sample(t, offered, truth) for t in (8, 256) for offered in (8, 32, 128))
    more = replace(few, expert_samples=samples, measurements=())

    spreads = [
        profile.fitted().spread("colocated_expert_flops_efficiency") for profile in (few, more)
    ]

    found = more.fitted().constants.colocated_expert_flops_efficiency
    assert spreads[1] < 0.5 * spreads[0]
    assert found == pytest.approx(0.5, rel=0.2)


def expert_sample(tokens: int, offered: int, truth: Constants) -> ExpertSample:
    empty = ExpertSample(tokens=tokens, experts_offered=offered, experts_hit=0, time_us=1)
    routing = empty.routing(SHAPE)
    scenario = Scenario(
        shape=SHAPE,
        gpu=GPUS["H200"],
        workload=Workload(context_tokens=1),
        constants=truth,
        routing=routing,
    )
    time_us = predict(scenario, one_gpu(tokens)).stages.experts.total_us
    return replace(empty, time_us=time_us, experts_hit=routing.distinct_experts(tokens))


@pytest.mark.parametrize("offered", [8, 32, 128])
def test_a_sample_is_routed_to_the_experts_it_offers_and_no_others(offered: int) -> None:
    sample = ExpertSample(tokens=8, experts_offered=offered, experts_hit=offered, time_us=10)

    routing = sample.routing(SHAPE)

    assert sum(p > 0 for p in routing.probabilities) == offered
    assert routing.experts_per_token == pytest.approx(8)


def test_a_sample_that_offers_fewer_experts_than_a_token_needs_is_refused() -> None:
    sample = ExpertSample(tokens=8, experts_offered=7, experts_hit=7, time_us=10)

    with pytest.raises(ConfigError, match="7 experts offered for top-8"):
        sample.routing(SHAPE)


def test_a_profile_of_measured_cases_is_valid_json() -> None:
    profile = profile_of([case_times(case) for case in CASES])

    assert '"host_gap_us"' in profile_text(profile)


def test_the_host_gap_is_what_a_lone_step_takes_beyond_its_stages() -> None:
    times = case_times(CASES[0])

    sample = assemble.step_samples([times])[0]

    assert sample.host_gap_us == pytest.approx(times.alone_us[0] - times.total_us)


def test_the_dense_part_of_a_model_with_plain_layers_is_left_to_the_step() -> None:
    shape = replace(SHAPE, num_moe_layers=47)

    rows = assemble.measurements(shape, [case_times(CASES[0])])

    assert {row.stage for row in rows} == {"core", "experts", "step"}


def test_the_width_of_the_cache_is_taken_from_what_was_allocated() -> None:
    memory = replace(MEMORY, kv_bytes_per_token=MEMORY.kv_bytes_per_token / 2)

    assert assemble.measured_shape(SHAPE, memory).kv_element_bytes == 1.0


def test_a_float32_model_that_is_loaded_as_bfloat16_is_one_of_two_bytes() -> None:
    assert assemble.measured_shape(replace(SHAPE, weight_bytes=4.0), MEMORY).weight_bytes == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_bytes": MEMORY.weight_bytes / 2}, "of weights were loaded"),
        ({"kv_bytes_per_token": MEMORY.kv_bytes_per_token * 5}, "this kind of attention"),
    ],
)
def test_a_model_that_is_not_its_shape_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assemble.measured_shape(SHAPE, replace(MEMORY, **change))


def test_too_many_unknown_kernels_are_refused_by_name() -> None:
    times = case_times(CASES[0])
    share = 0.03 * times.stages[0].total_us
    times.stages[0] = replace(
        times.stages[0], unmatched_us=share, by_kernel_us={(UNMATCHED, "strange_kernel"): share}
    )

    error = assemble.unmatched_error([case_times(CASES[1]), times])

    assert "2.9%" in error
    assert "strange_kernel" in error


def test_a_few_unknown_kernels_are_let_through() -> None:
    assert assemble.unmatched_error([case_times(case) for case in CASES]) == ""


def test_the_report_lists_an_error_for_each_measured_step() -> None:
    profile = profile_of([case_times(case) for case in CASES])

    errors = report.errors_pct(profile)

    assert [name for name, _ in errors] == [case.name for case in CASES]
    assert max(abs(error) for _, error in errors) < 3
