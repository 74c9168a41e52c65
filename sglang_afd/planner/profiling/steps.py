"""Runs all cases, block by block, and keeps the times of their steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from sglang_afd.planner.profiling.case_times import CaseTimes
from sglang_afd.planner.profiling.cases import Plan
from sglang_afd.planner.profiling.timeline import StepTimes
from sglang_afd.upstream.one_batch import StockRunner

Recorder = Callable[[int], list[StepTimes]]

_RECORDED_STEPS = 5


def measure(
    runner: StockRunner, plan: Plan, record: Recorder, say: Callable[[str], None]
) -> list[CaseTimes]:
    """All cases in turn, so often as the plan says, and the stages of each.

    A GPU's profiler stays in a process once it has been started, so there no step is timed after
    that. On a CPU stages follow the last timed steps at once, while the machine is as busy.
    """
    found = [CaseTimes(case=case) for case in plan.cases]
    is_apart = runner.device != "cpu"
    for block in range(plan.blocks):
        for times in found:
            _time_case(runner, plan, times)
            say(f"block {block + 1}: {times.case.name} {times.block_medians_us[-1] / 1000:.2f} ms")
            if block == plan.blocks - 1 and not is_apart:
                _record_stages(plan, times, record, plan.warm_steps + 2 * plan.steps)
    for times in found if is_apart else ():
        _warm_up(runner, plan, times)
        _record_stages(plan, times, record, plan.warm_steps)
        say(f"stages: {times.case.name} {times.total_us / 1000:.2f} ms")
    return found


def _record_stages(plan: Plan, times: CaseTimes, record: Recorder, steps_before: int) -> None:
    recorded = min(plan.steps, _RECORDED_STEPS)
    times.stage_context = times.case.context + steps_before + recorded / 2
    times.stages = record(recorded)


def _warm_up(runner: StockRunner, plan: Plan, times: CaseTimes) -> None:
    runner.prepare(num_rows=times.case.batch, context=times.case.context)
    for _ in range(plan.warm_steps):
        runner.step()
    runner.synchronize()


def _time_case(runner: StockRunner, plan: Plan, times: CaseTimes) -> None:
    _warm_up(runner, plan, times)
    times.step_context = times.case.context + plan.warm_steps + plan.steps / 2
    times.block_medians_us.append(_stream_us(runner, plan.steps))
    times.alone_us += [_alone_us(runner) for _ in range(plan.steps)]


def _stream_us(runner: StockRunner, steps: int) -> float:
    """Of a step when each is launched while the one before runs, as the overlap scheduler does."""
    if runner.device == "cpu":
        return statistics.median(_alone_us(runner) for _ in range(steps))
    began = torch.cuda.Event(enable_timing=True)
    ended = torch.cuda.Event(enable_timing=True)
    runner.step()  # until this one is launched the device has nothing to do
    began.record()
    for _ in range(steps):
        runner.step()
    ended.record()
    runner.synchronize()
    return float(began.elapsed_time(ended)) * 1000 / steps


def _alone_us(runner: StockRunner) -> float:
    runner.synchronize()
    started_s = time.perf_counter()
    runner.step()
    runner.synchronize()
    return (time.perf_counter() - started_s) * 1e6


def expert_tokens(plan: Plan) -> Sequence[int]:
    """Batches whose experts are called by themselves: small, middle, large."""
    batches = plan.batches
    return sorted({batches[0], batches[len(batches) // 2], batches[-1]})
