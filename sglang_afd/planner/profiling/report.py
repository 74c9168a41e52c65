"""Tables of a profile, for people."""

from __future__ import annotations

from sglang_afd.planner.predict import predict
from sglang_afd.planner.profile import Profile
from sglang_afd.planner.profiling.case_times import CaseTimes
from sglang_afd.planner.profiling.kernels import STAGES

_MOST_KERNELS = 40


def steps_table(profile: Profile) -> list[str]:
    """A line for each case, in ms."""
    lines = ["batch context  step ms (blocks)   alone  " + "".join(f"{s:>9}" for s in STAGES)]
    for step in profile.steps:
        blocks = "-".join(
            f"{value / 1000:.2f}"
            for value in (min(step.block_medians_us), max(step.block_medians_us))
        )
        stages = "".join(f"{step.stages_us[stage] / 1000:9.3f}" for stage in STAGES)
        lines.append(
            f"{step.batch:5d} {step.context_tokens:7.0f} {step.step_us / 1000:8.2f} ({blocks}) "
            f"{step.alone_us / 1000:7.2f} {stages}  unmatched {step.unmatched_share:.2%}"
        )
    return lines


def errors_pct(profile: Profile) -> list[tuple[str, float]]:
    """Signed error of each measured step, predicted with the constants fitted to this profile."""
    constants = profile.fitted().constants
    found = []
    for row in profile.measurements:
        if row.stage == "step":
            scenario = profile.scenario(row.workload).with_constants(constants)
            guess = predict(scenario, row.deployment).step_us
            name = f"{row.deployment.batch_per_attn_gpu}x{row.workload.context_tokens:.0f}"
            found.append((name, 100 * (guess / row.time_us - 1)))
    return found


def kernel_table(times: CaseTimes) -> list[str]:
    """The kernels of a case that take longest, with the stage they were counted in."""
    totals: dict[tuple[str, str], float] = {}
    for step in times.stages:
        for key, spent_us in step.by_kernel_us.items():
            totals[key] = totals.get(key, 0.0) + spent_us / len(times.stages)
    ordered = sorted(totals.items(), key=lambda item: -item[1])[:_MOST_KERNELS]
    return [f"{spent_us:10.1f} us  {stage:9s} {name[:110]}" for (stage, name), spent_us in ordered]
