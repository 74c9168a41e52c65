"""What a prediction may never do, for every model and GPU, up to the ends of each range."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode, Workload
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import CONFIGS, known_shape
from sglang_afd.planner.predict import predict
from sglang_afd.planner.routing import Routing, routing_from_histogram
from sglang_afd.planner.scenario import Scenario

RATES = (
    "hbm_bytes_per_us",
    "link_bytes_per_us",
    "network_bytes_per_us",
    "bf16_flops_per_us",
    "fp8_flops_per_us",
    "fp4_flops_per_us",
)
ROUNDING = 1 + 1e-9


def _measured(num_experts: int, topk: int) -> Routing:
    """The first quarter of the experts is chosen twice as often."""
    hot = num_experts // 4
    return routing_from_histogram([2.0] * hot + [1.0] * (num_experts - hot), topk)


@some.composite
def scenarios(draw: some.DrawFn) -> Scenario:
    shape = known_shape(draw(some.sampled_from([*CONFIGS, "Qwen3-30B-A3B-FP8"])))
    context = draw(some.sampled_from([1, 64, 1024, 8192, 131_072]))
    measured = _measured(shape.num_experts, shape.experts_per_token)
    return Scenario(
        shape=shape,
        gpu=GPUS[draw(some.sampled_from(list(GPUS)))],
        workload=Workload(
            context_tokens=context,
            context_std_tokens=draw(some.sampled_from([0, context / 2])),
            verify_tokens=draw(some.sampled_from([1, 2, 8])),
        ),
        routing=draw(some.sampled_from([None, measured])),
        jitter=draw(some.sampled_from([0.0, 0.05])),
        colocated_piece_tokens=draw(some.sampled_from([None, 256])),
    )


@some.composite
def deployments(draw: some.DrawFn, scenario: Scenario) -> Deployment:
    width = draw(some.sampled_from(_widths(scenario)))
    mode = draw(some.sampled_from(Mode))
    batch = draw(some.one_of(some.integers(1, 8), some.integers(1, 600)))
    if mode is Mode.COLOCATED:
        return Deployment(
            mode=mode, attn_gpus=width, expert_parallel=width, batch_per_attn_gpu=batch
        )
    return Deployment(
        mode=mode,
        attn_gpus=draw(some.integers(1, 72)),
        mlp_gpus=width,
        expert_parallel=width,
        micro_batches=draw(some.integers(1, min(4, batch))),
        batch_per_attn_gpu=batch,
        expert_kernels=draw(some.sampled_from(ExpertKernels)),
    )


def _widths(scenario: Scenario) -> list[int]:
    return [width for width in range(1, 73) if scenario.shape.num_experts % width == 0]


@some.composite
def pairs(draw: some.DrawFn) -> tuple[Scenario, Deployment]:
    scenario = draw(scenarios())
    return scenario, draw(deployments(scenario))


@settings(max_examples=40, deadline=None)
@given(pair=pairs())
def test_more_bandwidth_or_arithmetic_is_never_slower(pair: tuple[Scenario, Deployment]) -> None:
    scenario, deployment = pair
    before = predict(scenario, deployment).step_us

    for rate in RATES:
        faster = replace(scenario.gpu, **{rate: 1.3 * getattr(scenario.gpu, rate)})
        after = predict(replace(scenario, gpu=faster), deployment).step_us
        assert after <= before * ROUNDING, rate


@settings(max_examples=40, deadline=None)
@given(pair=pairs())
def test_one_more_request_token_or_choice_never_takes_less_time(
    pair: tuple[Scenario, Deployment],
) -> None:
    scenario, deployment = pair
    workload, shape = scenario.workload, scenario.shape
    before = predict(scenario, deployment).step_us

    steps = [
        predict(scenario, deployment.with_batch(deployment.batch_per_attn_gpu + more)).step_us
        for more in range(6)
    ]
    more = {
        "context": predict(
            replace(
                scenario, workload=replace(workload, context_tokens=workload.context_tokens + 1)
            ),
            deployment,
        ),
        "verified": predict(
            replace(scenario, workload=replace(workload, verify_tokens=workload.verify_tokens + 1)),
            deployment,
        ),
        "chosen": predict(
            replace(
                scenario,
                shape=replace(shape, experts_per_token=shape.experts_per_token + 1),
                routing=None,
            ),
            deployment,
        ),
    }

    for one, next_one in zip(steps, steps[1:], strict=False):
        assert next_one * ROUNDING >= one
    fewer = {"chosen": predict(replace(scenario, routing=None), deployment).step_us}
    for name, prediction in more.items():
        assert prediction.step_us * ROUNDING >= fewer.get(name, before), name


@settings(max_examples=40, deadline=None)
@given(pair=pairs())
def test_fewer_experts_on_a_gpu_are_never_more_bytes(
    pair: tuple[Scenario, Deployment],
) -> None:
    scenario, deployment = pair
    tokens = 64 * deployment.expert_parallel  # in all, so that the tokens of a copy stay
    found = []
    for width in _widths(scenario):
        spread = replace(
            deployment,
            mode=Mode.AFD,
            attn_gpus=1,
            mlp_gpus=width,
            expert_parallel=width,
            micro_batches=1,
            batch_per_attn_gpu=tokens,
        )
        found.append(predict(replace(scenario, jitter=0.0), spread))

    for narrow, wide in zip(found, found[1:], strict=False):
        assert wide.stages.experts.weights_us <= narrow.stages.experts.weights_us * ROUNDING
        assert wide.memory.roles[1].weight_bytes < narrow.memory.roles[1].weight_bytes


@settings(max_examples=40, deadline=None)
@given(pair=pairs())
def test_narrower_numbers_are_never_slower(pair: tuple[Scenario, Deployment]) -> None:
    scenario, deployment = pair
    before = predict(scenario, deployment)

    for field in ("weight_bytes", "kv_element_bytes", "combine_element_bytes"):
        half = replace(scenario.shape, **{field: getattr(scenario.shape, field) / 2})
        after = predict(replace(scenario, shape=half), deployment)
        assert after.step_us <= before.step_us * ROUNDING, field
        assert after.memory.roles[0].weight_bytes <= before.memory.roles[0].weight_bytes


def test_verified_tokens_pay_for_the_arithmetic_of_the_head() -> None:
    shape = known_shape("Qwen3-30B-A3B")

    def outside_us(verify_tokens: int) -> float:
        workload = Workload(context_tokens=1024, verify_tokens=verify_tokens)
        deployment = Deployment(
            mode=Mode.COLOCATED, attn_gpus=8, expert_parallel=8, batch_per_attn_gpu=512
        )
        return predict(
            Scenario(shape=shape, gpu=GPUS["H200"], workload=workload), deployment
        ).outside_layers_us

    flops = 2 * shape.hidden_size * shape.vocab_size * 512 * 4
    assert outside_us(8) - outside_us(4) == pytest.approx(flops / (0.78 * 989e6), rel=1e-3)


def test_layers_without_experts_pay_for_their_arithmetic() -> None:
    shape = replace(known_shape("DeepSeek-V3"), vocab_size=1)  # so that the head is nothing
    deployment = Deployment(
        mode=Mode.COLOCATED, attn_gpus=64, expert_parallel=64, batch_per_attn_gpu=2048
    )

    prediction = predict(
        Scenario(shape=shape, gpu=GPUS["H200"], workload=Workload(context_tokens=64)), deployment
    )

    of_a_layer = 3 * 2 * 7168 * 18432 * 2048 / 1979e6
    stages = prediction.stages
    assert prediction.outside_layers_us > 3 * (stages.core_us + stages.dense_us + of_a_layer)
