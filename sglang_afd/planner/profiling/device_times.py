"""Records the kernels of decode steps on a GPU."""

from __future__ import annotations

import time
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from sglang_afd.planner.profiling import timeline
from sglang_afd.planner.profiling.kernels import Kernel
from sglang_afd.planner.profiling.timeline import StepTimes
from sglang_afd.upstream.one_batch import StockRunner

_PAUSE_S = 0.1  # between steps, longer than anything a step waits for


def record(runner: StockRunner, steps: int) -> list[StepTimes]:
    """Stages of each of so many steps."""
    runner.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]):  # its start makes a step wait inside
        runner.step()
        runner.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recording:
        for _ in range(steps):
            time.sleep(_PAUSE_S)
            runner.step()
            runner.synchronize()
    # NOTE: the profiler's own tables would take seconds to build for tens of thousands of kernels.
    results: Any = recording.profiler.kineto_results
    kernels = [
        Kernel(event.name(), event.start_ns(), event.duration_ns())
        for event in results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]
    return [timeline.times_of(step) for step in timeline.split_steps(kernels, steps)]
