"""Makes the profile of what was measured (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Workload
from sglang_afd.planner.fit import ROW_NOISE
from sglang_afd.planner.profile import Measurement
from sglang_afd.planner.profiling import kernels
from sglang_afd.planner.profiling.case_times import CaseTimes
from sglang_afd.planner.samples import MemoryUse, StepSample, one_gpu
from sglang_afd.planner.shape import ModelShape

MOST_UNMATCHED = 0.02  # of the time; above it a stage could be wrong by more than a fit should be
_MOST_WEIGHT_ERROR = 0.25
_TYPE_BYTES = (1.0, 2.0, 4.0)


def measured_shape(shape: ModelShape, memory: MemoryUse) -> ModelShape:
    """With the widths of weights and cache as they were found: SGLang loads float32 as 16 bits.

    Raises: ConfigError, when the loaded model is not what the shape says.
    """
    elements = shape.kv_elements_per_token * shape.num_kv_layers
    width = memory.kv_bytes_per_token / elements
    if not 0.4 < width < 4.4:
        raise ConfigError(
            f"model {shape.name}: its cache takes {memory.kv_bytes_per_token:.0f} bytes a token, "
            f"{width:.2f} for each number of the shape read from config.json; wanted 0.5 to 4. "
            "The planner does not know this kind of attention"
        )
    # A pool has a few places more than it tells, and its width is that of a type.
    near = min(_TYPE_BYTES, key=lambda size: abs(width / size - 1))
    shape = replace(shape, kv_element_bytes=near if abs(width / near - 1) < 0.05 else width)
    for weight_bytes in _widths(shape):
        found = replace(shape, weight_bytes=weight_bytes)
        expected = found.all_dense_bytes + found.all_expert_bytes
        if abs(memory.weight_bytes / expected - 1) <= _MOST_WEIGHT_ERROR:
            return found
    weights = shape.all_dense_bytes + shape.all_expert_bytes
    raise ConfigError(
        f"model {shape.name}: {memory.weight_bytes / 1e9:.4g} GB of weights were loaded, "
        f"config.json says {weights / 1e9:.4g} GB; its shape or its quantization is misread"
    )


def _widths(shape: ModelShape) -> tuple[float, ...]:
    quantized = shape.weight_bytes < 2
    return (shape.weight_bytes,) if quantized else (shape.weight_bytes, 2.0, 4.0)


def measurements(shape: ModelShape, cases: Sequence[CaseTimes]) -> tuple[Measurement, ...]:
    """Stages per layer and whole steps, with their spread as noise."""
    return tuple(row for times in cases for row in _rows(shape, times))


def _rows(shape: ModelShape, times: CaseTimes) -> list[Measurement]:
    deployment = one_gpu(times.case.batch)
    at_stages = Workload(context_tokens=times.stage_context)
    parts = {kernels.CORE: ("core", shape.num_layers)}
    parts[kernels.EXPERTS] = ("experts", shape.num_moe_layers)
    if shape.num_moe_layers == shape.num_layers:
        # Otherwise the MLPs of plain layers cannot be told from the other dense kernels.
        parts[kernels.DENSE] = ("dense", shape.num_layers)
        parts[kernels.OUTSIDE] = ("outside_layers", 1)
    rows = [
        Measurement(
            workload=at_stages,
            deployment=deployment,
            stage=name,
            time_us=times.stage_us(stage) / count,
            noise=ROW_NOISE + times.stage_spread(stage),
        )
        for stage, (name, count) in parts.items()
    ]
    whole = Measurement(
        workload=Workload(context_tokens=times.step_context),
        deployment=deployment,
        stage="step",
        time_us=times.step_us,
        noise=ROW_NOISE + times.spread,
    )
    return [*rows, whole]


def step_samples(cases: Sequence[CaseTimes]) -> tuple[StepSample, ...]:
    """For people."""
    return tuple(
        StepSample(
            batch=times.case.batch,
            context_tokens=times.step_context,
            step_us=times.step_us,
            block_medians_us=tuple(times.block_medians_us),
            alone_us=statistics.median(times.alone_us),
            stages_us={stage: times.stage_us(stage) for stage in kernels.STAGES},
            host_gap_us=max(statistics.median(times.alone_us) - times.total_us, 0.0),
            unmatched_share=times.unmatched_share,
        )
        for times in cases
    )


def unmatched_error(cases: Sequence[CaseTimes]) -> str:
    """Why the profile cannot be used; "" when it can."""
    worst = max(cases, key=lambda times: times.unmatched_share)
    if worst.unmatched_share <= MOST_UNMATCHED:
        return ""
    times: dict[str, float] = {}
    for step in worst.stages:
        for (stage, name), spent_us in step.by_kernel_us.items():
            if stage not in kernels.STAGES:
                times[name] = times.get(name, 0.0) + spent_us / len(worst.stages)
    listed = sorted(times.items(), key=lambda item: -item[1])[:8]
    names = ", ".join(f"{name[:80]} ({spent_us:.0f} us)" for name, spent_us in listed)
    return (
        f"case {worst.case.name}: {worst.unmatched_share:.1%} of a step is spent in kernels that "
        f"no name pattern matches, at most {MOST_UNMATCHED:.0%} may be: {names}. Add them to "
        "sglang_afd/planner/profiling/kernels.py"
    )
