"""The parts of the step benchmark that need neither a model nor a device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from step import arguments, kernels, logits, models, plan, roles, summary
from step.cases import (
    Case,
    Setup,
    Variant,
    cases_of,
    check_divides,
    parse_cases,
    pool_tokens,
    probe_sizes,
    probed_rows,
)
from step.one_ahead import OneAhead
from step.roles import unit_rows

CASE = Case(batch=64, context=1024)


def _setup(**changes: object) -> Setup:
    fields: dict[str, object] = {
        "model": "qwen3-30b",
        "model_path": "/nowhere",
        "is_dummy": True,
        "device": "cuda",
        "dtype": "",
        "num_attn": 1,
        "num_mlp": 1,
        "micro_batches": "1",
        "rounds": "on",
        "wait_policy": "auto",
        "dispatch_dtype": "auto",
        "attention_backend": "fa3",
        "moe_runner_backend": "",
        "sm_share": "",
        "with_mps": True,
        "context_kind": "cached",
        "steps": 20,
        "warm_steps": 4,
        "profile_steps": 0,
    }
    return Setup(**(fields | changes))  # type: ignore[arg-type]


def _block(*peers: list[float], touched: list[list[int]] | None = None) -> summary.BlockRun:
    experts = [[0, 1, 2, 3]] if touched is None else touched
    return summary.BlockRun(
        peers=[
            summary.PeerRun(step_ms=ms, device_ms=[], stream_ms=1.0, touched=experts)
            for ms in peers
        ]
    )


def _equal_logits() -> dict[str, object]:
    rows = np.random.default_rng(0).normal(size=(6, 50))
    return logits.compare(rows, rows, bound=1e-6)


def test_cases_are_batch_times_context() -> None:
    cases = parse_cases("64x1024, 128x2048")

    assert cases == [CASE, Case(batch=128, context=2048)]
    assert [case.name for case in cases] == ["64x1024", "128x2048"]


@pytest.mark.parametrize("text", ["64", "64x", "0x1024", "64x8", "64x1024,64x1024", "axb", "-1x64"])
def test_what_is_no_case_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=text.split(",")[0]):
        parse_cases(text)


def test_a_batch_that_servers_cannot_share_evenly_is_refused() -> None:
    check_divides([CASE], 2)

    with pytest.raises(ValueError, match="64x1024"):
        check_divides([CASE], 3)


def test_a_pool_holds_the_largest_case_with_its_steps() -> None:
    tokens = pool_tokens([CASE, Case(batch=128, context=2048)], 25, 2, 32)

    assert tokens == 64 * (2048 + 25 + 16)


def test_unit_rows_cover_rounds_of_every_size_and_micro_batches() -> None:
    assert unit_rows(_setup(), [CASE]) == [64]
    assert unit_rows(_setup(num_attn=2, micro_batches="2"), [CASE]) == [16, 32, 64]


def test_the_step_time_is_the_median_over_all_steps_and_the_spread_is_over_blocks() -> None:
    colocated = [_block([10.0, 10.0, 10.0]), _block([12.0, 12.0, 12.0, 12.0])]
    afd = [_block([11.0, 13.0], [13.0, 13.0])]

    line = summary.line_of(CASE, colocated, afd, num_experts=4, logits=_equal_logits())

    assert (line["colocated_ms"], line["afd_ms"]) == (12.0, 13.0)
    assert line["ratio"] == round(13 / 12, 4)
    assert line["colocated_spread"] == {
        "block_medians_ms": [10.0, 12.0],
        "iqr_ms": 1.0,
        "min_ms": 10.0,
        "max_ms": 12.0,
    }
    assert line["afd_peer_ms"] == [12.0, 13.0]
    assert line["afd_tokens_per_s"] == round(32 / 12e-3 + 32 / 13e-3, 4)
    assert line["tokens_per_s_ratio"] == round((32 / 12 + 32 / 13) / (64 / 12), 4)
    assert line["valid"], line["invalid_because"]
    json.dumps(line)


def test_collapsed_routing_makes_a_result_invalid() -> None:
    collapsed = _block([10.0], touched=[[0, 1, 2, 3], [0, 1]])

    line = summary.line_of(
        CASE, [_block([10.0])], [collapsed], num_experts=4, logits=_equal_logits()
    )

    assert not line["valid"]
    assert line["experts_touched"]["afd"] == {"min": 0.5, "mean": 0.75}
    assert ["afd" in reason for reason in line["invalid_because"]] == [True]


def test_experts_are_those_that_all_servers_of_a_block_touch_together() -> None:
    peers = [
        summary.PeerRun(step_ms=[1.0], device_ms=[], stream_ms=1.0, touched=[[0, 1]]),
        summary.PeerRun(step_ms=[1.0], device_ms=[], stream_ms=1.0, touched=[[2, 3]]),
    ]

    share = summary.touched_share([summary.BlockRun(peers=peers)], 4)

    assert share == summary.Touched(least=1.0, mean=1.0)


def test_a_result_without_compared_logits_is_invalid() -> None:
    line = summary.line_of(CASE, [_block([1.0])], [_block([1.0])], num_experts=4, logits=None)

    assert not line["valid"]


def test_logits_of_one_row_may_differ_and_those_of_most_may_not() -> None:
    reference = np.random.default_rng(1).normal(size=(20, 100))
    one, most = reference.copy(), reference.copy()
    one[0] *= 1.5
    most[5:] += 0.5

    assert logits.compare(reference, one, bound=1e-3)["is_equal_within_bound"]
    assert not logits.compare(reference, most, bound=1e-3)["is_equal_within_bound"]


def test_logits_that_are_no_numbers_are_never_equal() -> None:
    reference = np.random.default_rng(2).normal(size=(4, 10))
    broken = reference.copy()
    broken[3, 3] = np.nan

    assert not logits.compare(reference, broken, bound=1.0)["is_equal_within_bound"]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("afd_dispatch", "dispatch"),
        ("afd_wait", "wait"),
        ("afd_plan", "plan"),
        ("afd_set_link", "exchange_other"),
        ("fused_moe_kernel", "moe"),
        ("void moe_align_block_size_kernel<int>", "moe"),
        ("moe_topk_sum", "moe"),
        ("_fwd_kernel_ep_scatter_1", "moe"),
        ("post_reorder_deepgemm_triton_kernel", "moe"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 3072u, (deep_gemm::GemmType)1>", "moe"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 9216u, (deep_gemm::GemmType)0>", "rest"),
        ("void topkGatingSoftmax<__nv_bfloat16>", "routing"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<bf16>>", "attention"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "rest"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<x>", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("nvjet_tst_64x8_64x16_4x2_v_bz_TNT", "rest"),
    ],
)
def test_kernels_are_grouped_by_their_names(name: str, group: str) -> None:
    assert kernels.group_of(name) == group


def test_times_are_by_group_with_gaps_and_overlap() -> None:
    recorded = [
        ("fused_moe_kernel", 0, 2_000_000),
        ("afd_wait", 1_000_000, 2_000_000),
        ("gemm", 4_000_000, 1_000_000),
    ]

    times = kernels.times_of(recorded, 2)

    assert (times["moe"], times["wait"], times["rest"]) == (1.0, 1.0, 0.5)
    assert (times["gaps"], times["overlap"], times["span"]) == (0.5, 0.5, 2.5)


def test_the_parts_of_a_difference_add_up_to_it() -> None:
    ms = 1_000_000
    colocated = kernels.times_of(
        [("gemm", 0, ms), ("fused_moe", 2 * ms, 4 * ms), ("flash", 6 * ms, 2 * ms)], 1
    )
    attn = kernels.times_of(
        [
            ("gemm", 0, 2 * ms),
            ("afd_dispatch", 3 * ms, ms),
            ("afd_wait", 4 * ms, 8 * ms),
            ("flash", 13 * ms, 3 * ms),
        ],
        1,
    )
    mlp = kernels.times_of(
        [("afd_plan", 0, 4 * ms), ("afd_pull", 5 * ms, ms), ("fused_moe", 6 * ms, 5 * ms)], 1
    )

    parts = kernels.difference(colocated, attn, mlp)

    assert parts["total"] == 8.0
    assert parts["exchange"] == 2.0
    assert parts["handover"] == 2.0
    assert sum(value for name, value in parts.items() if name != "total") == parts["total"]


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_a_model_is_a_directory_that_names_its_layers(name: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model", name, num_layers=3)

    config = models.read_config(str(path))
    assert config["num_hidden_layers"] == 3
    assert config["num_experts"] > config["num_experts_per_tok"]
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_plan_of_the_main_table_stays_under_five_minutes() -> None:
    cases = parse_cases(models.MODELS["qwen3-30b"].cases)

    assert plan.estimate_s([Variant(setup=_setup(), cases=cases)], 5) < 300


def _variant(cases: str, **changes: object) -> Variant:
    return Variant(setup=_setup(**changes), cases=parse_cases(cases))


def test_what_a_run_also_measures_differs_in_what_was_said_only() -> None:
    first, second = arguments.parse(
        ["--attn", "2", "--cases", "128x1024", "--also", "--rounds off --cases 64x1024"], ""
    )

    assert (first.attn, first.rounds, second.attn, second.rounds) == (2, "on", 2, "off")
    assert [case.name for case in first.cases] == ["128x1024"]
    assert [case.name for case in second.cases] == ["64x1024"]


@pytest.mark.parametrize(
    "changes", ["--layers 4", "--blocks 2", "--attention-backend triton", "--also='--attn 2'"]
)
def test_what_is_of_both_sides_cannot_differ_within_a_run(
    changes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments.parse([f"--also={changes}"], "")

    flag = changes.replace("=", " ").split()[0]
    assert f": no {flag} within it" in capsys.readouterr().err


def test_stock_sglang_runs_the_cases_of_all_variants_once() -> None:
    variants = [_variant("64x1024,128x1024"), _variant("128x1024,192x1024", num_attn=3)]

    assert [case.name for case in cases_of(variants)] == ["64x1024", "128x1024", "192x1024"]


def test_stock_sglang_has_a_graph_for_every_batch_whose_logits_are_compared() -> None:
    variants = [_variant("128x1024,256x1024", num_attn=2), _variant("256x1024", micro_batches="2")]

    flags = roles.colocated(variants, 1)

    assert probe_sizes(variants) == [32, 64, 128, 256]
    first = flags.index("--cuda-graph-bs-decode") + 1
    assert flags[first : first + 4] == ["32", "64", "128", "256"]


def test_the_main_table_needs_no_other_graphs_than_those_that_are_timed() -> None:
    flags = roles.colocated([_variant("64x1024,128x1024")], 1)

    first = flags.index("--cuda-graph-bs-decode") + 1
    assert flags[first : first + 3] == ["64", "128", "--cuda-graph-backend-prefill"]


def test_logits_are_compared_of_a_whole_bucket_of_a_graph_that_is_timed() -> None:
    variant = _variant("128x1024,256x1024", num_attn=2)

    flags = roles.attention(variant, 1, "http://nowhere")

    assert flags[flags.index("--cuda-graph-bs-decode") + 1] == str(variant.probe_rows) == "64"


@pytest.mark.parametrize("num_rows", [1, 8, 16, 33, 256])
def test_rows_that_are_compared_lie_all_over_a_batch_and_some_are_in_its_half(
    num_rows: int,
) -> None:
    rows = probed_rows(num_rows)

    assert len(rows) == min(num_rows, 32)
    assert rows[-1] >= num_rows * 0.9 - 1
    assert set(rows) & set(probed_rows(max(1, num_rows // 2)))


class _Step:
    """One that ends when it is waited for."""

    def __init__(self, running: list[_Step]) -> None:
        self._running = running
        running.append(self)

    def synchronize(self) -> None:
        assert self._running[0] is self, "waits for a step that is not the oldest"
        self._running.pop(0)


def test_one_step_is_launched_while_another_runs_and_no_third() -> None:
    running: list[_Step] = []
    ahead = OneAhead()
    counts = []

    for _ in range(4):
        step = _Step(running)
        counts.append(len(running))
        ahead.launched(step)

    assert counts == [1, 2, 2, 2]


def _distances(
    wrong_by: float, *, stock_by: float = 0.05, rounds_as_stock: bool
) -> dict[str, object]:
    """Of one server whose logits are off, where stock SGLang's own differ by `stock_by`."""
    rows, noise = np.random.default_rng(5).normal(size=(2, 3, 64, 50))
    stock = {size: rows[:, probed_rows(size)] for size in (32, 64)}
    stock[32] = stock[32] + stock_by * noise[:, probed_rows(32)]
    server = stock[64] + wrong_by * noise[::-1, probed_rows(64)]
    return logits.compare_servers(
        stock, [stock[64], server], 64, bound=1e-3, rounds_as_stock=rounds_as_stock
    )


def test_a_server_whose_logits_are_off_makes_a_result_invalid() -> None:
    equal = _distances(0.0, rounds_as_stock=True)
    one_off = _distances(0.05, rounds_as_stock=True)

    assert equal["is_equal_within_bound"]
    assert not one_off["is_equal_within_bound"]
    assert one_off["median_relative_of_servers"] == pytest.approx([0.0, 0.05], rel=0.2)


def test_logits_of_other_batches_may_differ_as_those_of_stock_sglang_do_and_no_more() -> None:
    within = _distances(0.05, rounds_as_stock=False)
    beyond = _distances(0.1, rounds_as_stock=False)

    assert within["is_equal_within_bound"], within
    assert not beyond["is_equal_within_bound"]


def test_where_stock_sglang_differs_from_itself_without_limit_nothing_is_equal() -> None:
    unrelated = _distances(1.0, stock_by=1.0, rounds_as_stock=False)

    assert not unrelated["is_equal_within_bound"]


@pytest.mark.parametrize(
    "changes", [{"num_attn": 2}, {"num_mlp": 2}, {"micro_batches": "2"}, {"dispatch_dtype": "fp8"}]
)
def test_only_one_server_of_each_role_rounds_as_stock_sglang_does(
    changes: dict[str, object],
) -> None:
    assert _variant("64x1024").rounds_as_stock
    assert not _variant("64x1024", **changes).rounds_as_stock


def test_expert_time_is_all_that_an_mlp_server_computes_between_its_exchanges() -> None:
    ms = 1_000_000
    recorded = [
        ("afd_plan", 0, 4 * ms),
        ("afd_pull", 4 * ms, ms),
        ("fused_moe", 5 * ms, 5 * ms),
        ("quant", 10 * ms, ms),
        ("afd_push", 11 * ms, ms),
    ]

    assert kernels.experts_ms(kernels.times_of(recorded, 2)) == 3.0
    assert kernels.units(recorded) == 1
