"""From the kernels of a recording, by name, to the answers of every command; times are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_afd.planner.__main__ import main
from sglang_afd.planner.deployment import Workload
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.predict import predict
from sglang_afd.planner.profile import Profile, read_profile, write_profile
from sglang_afd.planner.profiling import assemble, report, timeline
from sglang_afd.planner.profiling.case_times import CaseTimes
from sglang_afd.planner.profiling.cases import GPU_CASES, Case, parse_cases
from sglang_afd.planner.profiling.kernels import Kernel
from sglang_afd.planner.samples import MemoryUse, one_gpu
from sglang_afd.planner.scenario import Scenario

SHAPE = known_shape("Qwen3-30B-A3B")
GPU = GPUS["H200"]
CASES = parse_cases(GPU_CASES)

# As SGLang runs a layer on Hopper: FlashAttention 3, Triton experts. The number is the share of the
# stage's time that the kernel takes.
DENSE = (
    ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(int)", 0.05),
    ("nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT", 0.35),
    ("void fused_qknorm_warp<__nv_bfloat16>(Params)", 0.05),
    ("void fused_rope_store_kernel<true, 128>(Params)", 0.05),
)
CORE = (("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>", 1.0),)
AFTER = (
    ("nvjet_sm90_tst_32x64_64x16_1x2_h_bz_splitK_TNT", 0.25),
    ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(int)", 0.05),
    ("void cublasLt::splitKreduce_kernel<32, 16>(Params)", 0.05),
    ("void topkGatingSoftmax<float, 8>(float const*)", 0.15),
)
EXPERTS = (
    ("void moe_align_block_size_kernel<int>(Params)", 0.03),
    ("void count_and_sort_expert_tokens_kernel<int>(Params)", 0.02),
    ("fused_moe_kernel", 0.6),
    ("void act_and_mul_kernel<__nv_bfloat16, (ActivationKind)0>(ActivationParams)", 0.02),
    ("fused_moe_kernel", 0.3),
    ("triton_poi_fused_mul_sum_0", 0.03),
)
BEFORE = (("void at::native::vectorized_gather_kernel<16, long>(char*)", 0.1),)
BEHIND = (
    ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(int)", 0.1),
    ("nvjet_sm90_tst_128x128_64x4_1x2_h_bz_TNT", 0.6),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps> >", 0.2),
)


def recording(case: Case) -> list[Kernel]:
    """Of a step on a GPU that is as the priors say."""
    workload = Workload(context_tokens=case.context)
    found = predict(Scenario(shape=SHAPE, gpu=GPU, workload=workload), one_gpu(case.batch))
    stages = found.stages
    layer = [
        *[(name, share * stages.dense_us) for name, share in DENSE],
        *[(name, share * stages.core_us) for name, share in CORE],
        *[(name, share * stages.dense_us) for name, share in AFTER],
        *[(name, share * stages.experts.total_us) for name, share in EXPERTS],
    ]
    outside_us = found.outside_layers_us
    step = [(name, share * outside_us) for name, share in BEFORE]
    step += layer * SHAPE.num_layers
    step += [(name, share * outside_us) for name, share in BEHIND]
    kernels, now_ns = [], 0
    for name, us in step:
        kernels.append(Kernel(name, now_ns, round(us * 1000)))
        now_ns += round(us * 1000)
    return kernels


def case_times(case: Case) -> CaseTimes:
    times = timeline.times_of(recording(case))
    return CaseTimes(
        case=case,
        step_context=case.context,
        stage_context=case.context,
        block_medians_us=[times.total_us * factor for factor in (0.995, 1.005)],
        alone_us=[times.total_us + 1500],
        stages=[times] * 5,
    )


@pytest.fixture(scope="module")
def profile() -> Profile:
    found = [case_times(case) for case in CASES]
    assert not assemble.unmatched_error(found)
    return Profile(
        shape=SHAPE,
        gpu=GPU,
        measurements=assemble.measurements(SHAPE, found),
        provenance={"clock": "made up for a test"},
        steps=assemble.step_samples(found),
        memory=MemoryUse(
            total_bytes=GPU.memory_bytes,
            weight_bytes=SHAPE.all_dense_bytes + SHAPE.all_expert_bytes,
            kv_bytes_per_token=SHAPE.kv_bytes_per_token,
            kv_pool_tokens=300_000,
            other_bytes=2e9,
        ),
    )


@pytest.fixture
def path(profile: Profile, tmp_path: Path) -> Path:
    write_profile(profile, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_the_steps_of_a_recording_are_predicted_from_its_profile(path: Path) -> None:
    errors = dict(report.errors_pct(read_profile(path)))

    assert len(errors) == len(CASES)
    assert max(map(abs, errors.values())) < 3


COMMANDS = {
    "predict --attn-gpus 4 --mlp-gpus 4 --batch 64": "tokens/s per GPU",
    "search --max-gpus 8 --max-tpot 30": "best disaggregated",
    "explain --max-gpus 8 --max-tpot 30": "speed-up",
    "what-if --max-gpus 8 --max-tpot 30": "experts in SRAM",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_answers_from_a_profile_of_a_gpu(
    command: str, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    name, *flags = command.split()

    code = main([name, "--profile", str(path), "--context", "4096", *flags])

    printed = capsys.readouterr().out
    assert code == 0
    assert COMMANDS[command] in printed
    assert "profile" in printed
