"""One profiling run: loads the model, measures, and makes the profile."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.profile import Profile
from sglang_afd.planner.profiling import (
    assemble,
    cpu,
    device_times,
    devices,
    expert_calls,
    module_times,
    routing_counts,
    steps,
    versions,
    weights,
)
from sglang_afd.planner.profiling.case_times import CaseTimes
from sglang_afd.planner.profiling.cases import Plan
from sglang_afd.planner.profiling.devices import Device
from sglang_afd.planner.profiling.kernels import CORE, DENSE
from sglang_afd.planner.profiling.timeline import StepTimes
from sglang_afd.planner.samples import MemoryUse
from sglang_afd.planner.shape import ModelShape
from sglang_afd.upstream.one_batch import StockRunner, layers_of


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run is asked for."""

    plan: Plan
    shape: ModelShape
    device: Device
    gpu: Gpu | None  # None on a CPU, which is described by what is measured
    flags: tuple[str, ...]  # SGLang's
    has_random_weights: bool
    model_path: str


class Session:
    """Keeps what was found so far, so that a later failure does not lose it."""

    def __init__(self, wanted: Wanted, say: Callable[[str], None]) -> None:
        self._wanted, self._say = wanted, say
        self._began_s = time.monotonic()
        self._runner = StockRunner(wanted.flags)
        self._layers = layers_of(self._runner.model)
        if wanted.has_random_weights:
            weights.spread(self._runner.model)
        say(f"loaded after {self._elapsed_s():.0f} s; {self._runner.num_graphs} decode graphs")
        self._memory = self._memory_use()
        self._shape = assemble.measured_shape(wanted.shape, self._memory)

    def measure_steps(self) -> tuple[Profile, list[CaseTimes]]:
        """Everything but the calls of the experts by themselves."""
        plan, shape = self._wanted.plan, self._shape
        cases = steps.measure(self._runner, plan, self._record, self._say)
        clocks = {f"{name}_after": value for name, value in devices.clock_facts().items()}
        counts = routing_counts.count(
            self._runner,
            plan.widest,
            num_experts=shape.num_experts,
            top_k=shape.experts_per_token,
        )
        probabilities = routing_counts.typical(counts, shape.experts_per_token)
        profile = Profile(
            shape=shape,
            gpu=self._wanted.gpu or self._describe_cpu(cases),
            measurements=assemble.measurements(shape, cases),
            expert_probabilities=probabilities,
            provenance=self._provenance(cases, bool(probabilities)) | clocks,
            steps=assemble.step_samples(cases),
            memory=self._memory,
        )
        return profile, cases

    def measure_experts(self, profile: Profile) -> Profile:
        """The profile with the experts' times by tokens and experts hit."""
        samples = expert_calls.sample(
            self._layers,
            profile.shape,
            steps.expert_tokens(self._wanted.plan),
            self._runner.device,
        )
        self._say(f"experts called by themselves; {self._elapsed_s():.0f} s so far")
        return replace(profile, expert_samples=tuple(samples))

    def _record(self, number: int) -> list[StepTimes]:
        if self._runner.device == "cpu":
            return module_times.record(self._runner, self._layers, number)
        return device_times.record(self._runner, number)

    def _memory_use(self) -> MemoryUse:
        found = self._runner.memory()
        on_gpu = self._runner.device != "cpu"
        reserved = torch.cuda.memory_reserved() if on_gpu else 0
        return MemoryUse(
            total_bytes=self._wanted.device.total_bytes,
            weight_bytes=found.weight_bytes,
            kv_bytes_per_token=found.kv_bytes / found.kv_pool_tokens,
            kv_pool_tokens=found.kv_pool_tokens,
            other_bytes=max(0, reserved - found.weight_bytes - found.kv_bytes),
        )

    def _describe_cpu(self, cases: list[CaseTimes]) -> Gpu:
        samples = [
            cpu.LayerSample(
                batch=times.case.batch,
                context_tokens=times.stage_context,
                core_us=times.stage_us(CORE) / self._shape.num_layers,
                dense_us=times.stage_us(DENSE) / self._shape.num_layers,
            )
            for times in cases
        ]
        dtype = next(p.dtype for p in self._runner.model.parameters() if p.is_floating_point())
        return cpu.describe(
            self._wanted.device.name,
            self._wanted.device.total_bytes,
            cpu.measure_peaks(dtype),
            self._shape,
            samples,
        )

    def _provenance(self, cases: list[CaseTimes], has_histogram: bool) -> dict[str, str]:
        wanted, plan = self._wanted, self._wanted.plan
        random = "random, by name: routing is nearly even"
        return {
            "model_path": wanted.model_path,
            "weights": random if wanted.has_random_weights else "of the checkpoint",
            "routing": "histogram of the middling layer" if has_histogram else "too few choices",
            "device": wanted.device.name,
            "busy_percent_before": f"{wanted.device.busy_percent:.1f}",
            "clock": "wall clock of a step"
            if wanted.device.kind == "cpu"
            else "CUDA events, from step to step",
            "threads": str(torch.get_num_threads()),
            "attention_backend": self._runner.attention_backend,
            "moe_runner_backend": self._runner.moe_runner_backend,
            "sampling": f"{plan.blocks} blocks of {plan.steps} steps, {plan.warm_steps} before",
            "unmatched_share": f"{max(times.unmatched_share for times in cases):.5f}",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **versions.versions(),
            **wanted.device.facts,
        }

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
