"""Core attention against times of its kernels on an H200."""

from __future__ import annotations

from sglang_afd.planner.deployment import Workload
from sglang_afd.planner.fit import Observation, fit
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.predict import predict
from sglang_afd.planner.samples import one_gpu
from sglang_afd.planner.scenario import Scenario

# FlashAttention 3 of SGLang 0.5.14 on an H200, 4 KV heads of 128: batch, context, us of a layer.
# Source: aiconfigurator-core 0.12, generation_attention_perf of h200_sxm.
H200_CORE = [
    (8, 8192, 42.6),
    (32, 4096, 73.3),
    (64, 2048, 73.5),
    (128, 1024, 78.3),
    (128, 2048, 136.8),
    (256, 512, 84.4),
    (512, 256, 99.4),
]


def _fit_of_core(times: list[tuple[int, int, float]]) -> list[float]:
    """Relative errors of a fit to times of core attention on an H200."""
    shape = known_shape("Qwen3-30B-A3B")
    rows = [
        Observation(
            scenario=Scenario(
                shape=shape, gpu=GPUS["H200"], workload=Workload(context_tokens=context)
            ),
            deployment=one_gpu(batch),
            time_us=time_us,
            stage="core",
        )
        for batch, context, time_us in times
    ]
    constants = fit(rows).constants
    return [
        predict(row.scenario.with_constants(constants), row.deployment).stages.core_us / row.time_us
        - 1
        for row in rows
    ]


def test_a_request_costs_core_attention_beyond_its_cache() -> None:
    """Most rows read as many cached tokens, and take 73 to 99 us."""
    assert max(map(abs, _fit_of_core(H200_CORE))) < 0.06


def test_core_attention_as_profiled_on_an_h200_is_within_the_bounds() -> None:
    errors = _fit_of_core([(128, 1024, 81.0), (128, 2048, 139.0)])

    assert max(map(abs, errors)) < 0.03


def test_a_kernel_that_starts_slowly_is_within_the_bounds() -> None:
    """TensorRT-LLM's on the same GPU, from the same tables: 26 us beside its cache."""
    errors = _fit_of_core(
        [(64, 1024, 64.8), (128, 1024, 91.5), (64, 2048, 90.3), (64, 4096, 145.8)]
    )

    assert max(map(abs, errors)) < 0.06
