"""Other assumptions change what they should, in the direction that they should."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import PRIORS, site, told

from sglang_afd.planner import cases
from sglang_afd.planner.cases import Case, Outcome
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.search import Space
from sglang_afd.planner.site import Site

MODEL = ("--model", "Qwen3-30B-A3B", "--gpu", "H200", "--source", "roofline", "--context", "4096")


def _base(where: Site | None = None, max_gpus: int = 8) -> Case:
    where = where or site()
    return Case(
        name="as given",
        site=where,
        base_sites=(where,),
        space=Space(max_gpus=max_gpus),
        model_noise=0.0,
    )


def _speed_up(row: Outcome) -> float:
    assert row.answered is not None
    assert row.answered.verdict is not None
    return row.answered.verdict.speed_up


def _afd(attn: int = 6, mlp: int = 2, batch: int = 64) -> Deployment:
    return Deployment(
        mode=Mode.AFD,
        attn_gpus=attn,
        mlp_gpus=mlp,
        expert_parallel=mlp,
        micro_batches=2,
        batch_per_attn_gpu=batch,
        expert_kernels=ExpertKernels.GROUPED,
    )


def test_free_experts_are_a_bound_for_every_deployment_with_experts() -> None:
    base = _base()

    given, free = cases.outcomes(PRIORS, [base, cases.free_experts_case(base)])

    assert free.value > given.value
    assert free.base_value == pytest.approx(given.base_value)


def test_of_equal_deployments_the_one_with_fewest_gpus_is_the_best() -> None:
    base = _base(site("Qwen3-235B-A22B-FP8", GPUS["GB200"], 8192), max_gpus=36)

    (free,) = cases.outcomes(PRIORS, [cases.free_experts_case(base)])

    assert free.answered is not None
    best = free.answered.found.disaggregated.best
    assert best is not None
    assert best.deployment.attn_gpus == 1


def test_free_experts_count_attention_gpus_only_and_take_no_time() -> None:
    where = site(verify_tokens=4, accepted_tokens=2.0)
    free = replace(where, has_free_experts=True)

    plain, bound = where.predict(_afd()), free.predict(_afd())

    tokens = bound.tokens_per_s_per_gpu * bound.step_us * 6 / 1e6
    assert bound.stages.mlp_us == 0
    assert tokens == pytest.approx(6 * 64 * 2.0)
    assert bound.tpot_us == pytest.approx(bound.step_us / 2.0)
    assert replace(free, mlp_price=9.0).value(bound) == pytest.approx(bound.tokens_per_s_per_gpu)
    assert bound.step_us <= plain.step_us
    assert len(bound.memory.roles) == 1


def test_two_roles_on_the_same_gpu_type_without_a_link_are_the_plain_prediction() -> None:
    apart = replace(GPUS["H200"], link_domain_gpus=1)
    plain = site(gpu=apart)

    mixed = replace(plain, mlp_gpu=apart).predict(_afd())

    expected = plain.predict(_afd())
    assert mixed.step_us == pytest.approx(expected.step_us, rel=1e-12)
    assert mixed.tokens_per_s_per_gpu == pytest.approx(expected.tokens_per_s_per_gpu)
    assert mixed.memory == expected.memory


def test_rows_of_two_types_go_over_the_network() -> None:
    plain = site()

    mixed = replace(plain, mlp_gpu=GPUS["H200"]).predict(_afd())

    assert mixed.stages.exchange_us > plain.predict(_afd()).stages.exchange_us


def test_the_deviation_of_contexts_grows_with_their_mean() -> None:
    base = _base(site(context_std_tokens=1000.0))

    changed = cases.context_case(base, 4 * 4096)

    workload = changed.site.scenario.workload
    assert (workload.context_tokens, workload.context_std_tokens) == (16_384, 4000)


def test_a_role_takes_the_time_and_the_memory_of_its_own_gpu() -> None:
    where = replace(site(), mlp_gpu=GPUS["H20"])

    mixed = where.predict(_afd())

    on_h200, on_h20 = (
        site(gpu=replace(GPUS[name], link_domain_gpus=1)).predict(_afd())
        for name in ("H200", "H20")
    )
    assert mixed.stages.attn_us == on_h200.stages.attn_us
    assert mixed.stages.mlp_us == on_h20.stages.mlp_us
    assert mixed.memory.roles[0] == on_h200.memory.roles[0]
    assert mixed.memory.roles[1] == on_h20.memory.roles[1]


def test_mlp_gpus_too_small_for_the_experts_have_no_room() -> None:
    tiny = replace(GPUS["H200"], memory_bytes=2e10)
    where = replace(site(), mlp_gpu=tiny)

    assert where.room(_afd(mlp=1, attn=7)) == 0
    assert site().room(_afd(mlp=1, attn=7)) > 0


def test_twice_the_price_halves_throughput_per_cost_and_keeps_the_ratio() -> None:
    base = _base()
    dear = replace(base.site, attn_price=2.0, mlp_price=2.0)

    cheap, twice = cases.outcomes(PRIORS, [base, replace(base, site=dear, base_sites=(dear,))])

    assert twice.value == pytest.approx(cheap.value / 2)
    assert _speed_up(twice) == pytest.approx(_speed_up(cheap))


def test_cheap_mlp_gpus_pay_more_than_dear_ones() -> None:
    base = _base()
    gpu = GPUS["H200"]

    def speed_up(mlp_price: float) -> float:
        case = cases.two_types_case(base, (gpu, 2.0), (GPUS["H20"], mlp_price), 0.0)
        case = replace(case, base_sites=case.base_sites[:1])
        return _speed_up(cases.outcome(PRIORS, case))

    assert speed_up(0.2) > speed_up(1.0) > speed_up(3.0)


def test_the_baseline_of_two_types_is_the_better_one_of_both() -> None:
    base = _base()
    case = cases.two_types_case(base, (GPUS["H200"], 10.0), (GPUS["H20"], 0.1), 0.0)

    row = cases.outcome(PRIORS, case)

    alone = cases.outcome(PRIORS, cases.gpu_case(base, GPUS["H20"], 0.1, 0.0))
    assert row.base_value == pytest.approx(alone.base_value)


def test_speculation_yields_more_tokens_from_fewer_steps() -> None:
    base = _base(site("Qwen3-235B-A22B-FP8", GPUS["GB200"], 8192), max_gpus=32)

    plain, guessed, useless = cases.outcomes(
        PRIORS,
        [base, cases.speculation_case(base, 4, 2.5), cases.speculation_case(base, 4, 1.0)],
    )

    assert guessed.value > plain.value > useless.value
    assert guessed.value == pytest.approx(2.5 * useless.value)


def test_a_longer_context_leaves_less_throughput() -> None:
    base = _base()

    values = [
        row.value
        for row in cases.outcomes(
            PRIORS, [base, *(cases.context_case(base, context) for context in (8192, 16384))]
        )
    ]

    assert values == sorted(values, reverse=True)


def test_what_cannot_be_is_a_row_with_its_reason() -> None:
    base = _base(site("Qwen3-235B-A22B"))

    row = cases.outcome(PRIORS, cases.gpu_case(base, replace(GPUS["H100"]), 1.0, 0.0))
    never = cases.outcome(PRIORS, cases.context_case(base, 5e7))

    assert row.answered is not None or row.reason
    assert never.answered is None
    assert "nothing fits" in never.reason


def test_without_flags_there_are_six_rows() -> None:
    rows = told("what-if", *MODEL)["cases"]

    assert [row["name"] for row in rows] == [
        "as given",
        "fused expert kernels",
        "context 8192",
        "context 16384",
        "verify 4, accept 2.5",
        "experts in SRAM, free",
    ]


def test_the_first_row_is_what_search_says() -> None:
    row = told("what-if", *MODEL, "--other-kernels")["cases"][0]
    found = told("search", *MODEL)

    assert row["verdict"] == found["verdict"]
    assert row["disaggregated"] == found["disaggregated"]


def test_each_flag_adds_its_rows() -> None:
    flags = "--contexts 2048,8192 --speculation 2:1.5 --sram-experts --gpus H20 --attn-gpu H20"
    prices = "--mlp-gpu H100 --prices H200=3,H20=1,H100=2"

    rows = told("what-if", *MODEL, *flags.split(), *prices.split())["cases"]

    assert [row["name"] for row in rows[1:]] == [
        "context 2048",
        "context 8192",
        "verify 2, accept 1.5",
        "experts in SRAM, free",
        "all on H20",
        "H20 attends, H100 has experts",
    ]


def test_a_price_on_the_command_line_divides_what_that_gpu_gives() -> None:
    flags = ("--gpus", "H20")

    free = told("what-if", *MODEL, *flags)["cases"]
    priced = told("what-if", *MODEL, *flags, "--prices", "H200=4,H20=0.5")["cases"]

    for row, other, price in zip(free, priced, (4, 0.5), strict=True):
        assert other["disaggregated_per_cost"] == pytest.approx(
            row["disaggregated_per_cost"] / price
        )
        assert other["colocated_per_cost"] == pytest.approx(row["colocated_per_cost"] / price)
