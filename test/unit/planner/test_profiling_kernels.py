"""Kernel names to stages, and a recording to steps and stages."""

from __future__ import annotations

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.profiling import kernels, timeline
from sglang_afd.planner.profiling.kernels import CORE, DENSE, EXCHANGE, EXPERTS, OUTSIDE, Kernel

NORM = (
    "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*, unsigned int)"
)
CORE_KERNEL = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90"
    "<flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1> > > > > >(Params)"
)
PROJECTION = "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT"
EXPERT = "fused_moe_kernel"
ACTIVATION = "void act_and_mul_kernel<__nv_bfloat16, &silu>(__nv_bfloat16*, __nv_bfloat16 const*)"
QUANTIZE = "per_token_group_quant_8bit_kernel"
SAMPLE = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps> >"


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        (NORM, DENSE),
        (CORE_KERNEL, CORE),
        ("void flash::prepare_varlen_num_blocks_kernel<1>(int, int)", CORE),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<>(Params)", CORE),
        ("_fwd_grouped_kernel_stage1", CORE),
        (PROJECTION, DENSE),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)", DENSE),
        ("void cublasLt::splitKreduce_kernel<32, 16>(Params)", DENSE),
        ("_router_triton_kernel", DENSE),
        ("void topkGatingSoftmax<float, 8>(float const*)", DENSE),
        ("void fused_qknorm_warp<__nv_bfloat16>(Params)", DENSE),
        ("void fused_rope_store_kernel<true, 128>(Params)", DENSE),
        ("void at::native::vectorized_elementwise_kernel<4, Add>(int)", DENSE),
        ("Memcpy DtoD (Device -> Device)", DENSE),
        (EXPERT, EXPERTS),
        ("void moe_sum_reduce_kernel<128>(Params)", EXPERTS),
        ("void moe_align_block_size_kernel<int>(Params)", EXPERTS),
        ("void count_and_sort_expert_tokens_kernel<int>(Params)", EXPERTS),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<1u, (deep_gemm::GemmType)1>(int*)", EXPERTS),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<1u, (deep_gemm::GemmType)0>(int*)", DENSE),
        ("void align_single_token_kernel<int>(Params)", EXPERTS),
        ("_tma_align_input_scale_kernel", EXPERTS),
        ("post_reorder_triton_kernel", EXPERTS),
        ("void set_mla_kv_buffer_kernel<1>(Params)", DENSE),
        ("triton_per_fused_add_mean_mul_pow_rsqrt_0", DENSE),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", EXCHANGE),
        ("void deep_ep::internode_ll::dispatch<true>(Params)", EXCHANGE),
        ("something_nobody_has_seen", None),
    ],
)
def test_a_kernel_belongs_to_a_stage_by_its_name(name: str, stage: str | None) -> None:
    assert kernels.stages_of([name]) == [stage]


@pytest.mark.parametrize("gemm", [EXPERT, PROJECTION])
def test_an_activation_belongs_to_the_product_before_it(gemm: str) -> None:
    stages = kernels.stages_of([gemm, ACTIVATION])

    assert stages[1] == stages[0]


@pytest.mark.parametrize("gemm", [EXPERT, PROJECTION])
def test_a_sum_that_torch_compiles_belongs_to_the_product_before_it(gemm: str) -> None:
    """SGLang sums the chosen experts of up to 32 tokens so."""
    stages = kernels.stages_of([gemm, "triton_poi_fused_mul_sum_0", NORM])

    assert stages[1] == stages[0]


@pytest.mark.parametrize("gemm", [EXPERT, PROJECTION])
def test_a_quantization_belongs_to_the_product_behind_it(gemm: str) -> None:
    stages = kernels.stages_of([QUANTIZE, gemm])

    assert stages[0] == stages[1]


def run_of(names: list[str], start_us: float, each_us: float, gap_us: float = 0) -> list[Kernel]:
    """Kernels one after the other."""
    found = []
    for name in names:
        found.append(Kernel(name, round(start_us * 1000), round(each_us * 1000)))
        start_us += each_us + gap_us
    return found


LAYER = [NORM, PROJECTION, CORE_KERNEL, PROJECTION, NORM, EXPERT, ACTIVATION, EXPERT]
STEP = ["Memcpy HtoD (Pinned -> Device)", *LAYER, *LAYER, NORM, PROJECTION, SAMPLE]


def test_every_microsecond_of_a_step_belongs_to_one_stage() -> None:
    step = run_of(STEP, start_us=50, each_us=10, gap_us=1)

    times = timeline.times_of(step)

    assert times.stages_us == pytest.approx(
        {CORE: 2 * 11, DENSE: 8 * 11, EXPERTS: 6 * 11, EXCHANGE: 0, OUTSIDE: 10 + 3 * 11}
    )
    assert times.total_us == pytest.approx(10 * len(STEP) + len(STEP) - 1)
    assert times.unmatched_us == 0


def test_what_comes_before_the_first_layer_and_after_the_last_is_outside() -> None:
    step = run_of(STEP, start_us=0, each_us=10)

    times = timeline.times_of(step)

    outside = {name for (stage, name) in times.by_kernel_us if stage == OUTSIDE}
    assert outside == {STEP[0], NORM, PROJECTION, SAMPLE}


def test_a_gap_that_the_host_leaves_is_no_part_of_a_stage() -> None:
    early = run_of(STEP[:1], start_us=0, each_us=10)
    late = run_of(STEP[1:], start_us=2000, each_us=10)

    times = timeline.times_of([*early, *late])

    assert times.total_us == pytest.approx(10 * len(STEP))


def test_kernels_that_run_at_once_are_not_counted_twice() -> None:
    step = [
        Kernel(NORM, 0, 10_000),
        Kernel(PROJECTION, 2_000, 6_000),
        Kernel(EXPERT, 10_000, 5_000),
    ]

    times = timeline.times_of(step)

    assert times.total_us == pytest.approx(15)


def test_unknown_kernels_are_told_by_share_and_name() -> None:
    names = [*STEP[:-1], "something_nobody_has_seen"]

    times = timeline.times_of(run_of(names, start_us=0, each_us=10))

    assert times.unmatched_share == pytest.approx(1 / len(STEP))
    assert (timeline.UNMATCHED, "something_nobody_has_seen") in times.by_kernel_us


def test_a_recording_is_cut_at_the_pauses() -> None:
    recorded = [k for number in range(4) for k in run_of(STEP, number * 25_000, 10, gap_us=3)]

    steps = timeline.split_steps(recorded[::-1], 4)

    assert [len(step) for step in steps] == [len(STEP)] * 4
    assert all(step[0].name == STEP[0] for step in steps)


def test_steps_without_pauses_between_them_are_refused() -> None:
    recorded = run_of(STEP * 3, start_us=0, each_us=10, gap_us=3)

    with pytest.raises(ConfigError, match="cannot be told apart"):
        timeline.split_steps(recorded, 3)


def test_a_profiler_that_records_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="recorded 0 kernels"):
        timeline.split_steps([], 3)
