"""How fast and how exact the planner's simulator is. Prints one JSON line.

    python benchmark/bench_simulator.py [--quick]

Accuracy: the closed form without noise over a grid of deployments; the Gaussian barrier; short cuts
against the queues of the real system; a recorded timeline played again. Speed: 72 GPUs and 1024.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from provenance import commit, cpu_name

sys.path.append(str(Path(__file__).parents[1]))  # where sglang_afd is not installed

from sglang_afd.planner.barrier import gaussian_barrier_us
from sglang_afd.planner.deployment import Deployment, Mode, Workload
from sglang_afd.planner.gpu import known_gpu
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.pipeline import Pipeline
from sglang_afd.planner.predict import predict
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.simulator.disturbance import QUIET, TYPICAL, Disturbance
from sglang_afd.planner.simulator.recording import read_recording
from sglang_afd.planner.simulator.replay import replay
from sglang_afd.planner.simulator.result import Simulated
from sglang_afd.planner.simulator.simulation import Options, simulate
from sglang_afd.trace.reading import read_timeline

TIMELINES = Path(__file__).parent / "planner" / "timelines" / "3a2f"
WARM_STEPS = 9  # of the recording
SCENARIOS = {
    f"{model} on {gpu}, {context}": Scenario(
        shape=known_shape(model), gpu=known_gpu(gpu), workload=Workload(context_tokens=context)
    )
    for model, gpu, context in (
        ("Qwen3-235B-A22B-FP8", "GB200", 8192),
        ("DeepSeek-V3", "GB200", 4096),
        ("Qwen3-30B-A3B", "H200", 4096),
    )
}
QWEN, *_ = SCENARIOS.values()
SPLITS = ((1, 1, 1), (4, 1, 1), (8, 8, 8), (28, 4, 4), (24, 8, 4), (64, 8, 8))
GROUPS = ((2, 1), (4, 1), (8, 2), (16, 4), (28, 4))  # peers and ranks
BATCHES = (16, 96, 384)


def afd(attn: int, mlp: int, width: int, m: int, batch: int) -> Deployment:
    """A disaggregated deployment."""
    return Deployment(
        mode=Mode.AFD,
        attn_gpus=attn,
        mlp_gpus=mlp,
        expert_parallel=width,
        micro_batches=m,
        batch_per_attn_gpu=batch,
    )


def closed_form(quick: bool) -> dict[str, Any]:
    """Worst error of step time and throughput without noise."""
    cases, worst = 0, 0.0
    options = Options(num_steps=2, warm_steps=4)
    for scenario in list(SCENARIOS.values())[: 1 if quick else None]:
        for split in SPLITS[: 4 if quick else None]:
            for m in (1, 2, 3, 4):
                for batch in BATCHES[1:2] if quick else BATCHES:
                    where = afd(*split, m, batch)
                    predicted = predict(scenario, where)
                    found = simulate(scenario, where, QUIET, options)
                    cases += 1
                    for ours, theirs in (
                        (found.step.mean_us, predicted.step_us),
                        (found.tokens_per_s_per_gpu, predicted.tokens_per_s_per_gpu),
                    ):
                        worst = max(worst, abs(ours / theirs - 1))
    return {"cases": cases, "worst_pct": round(100 * worst, 9)}


def barrier(quick: bool) -> dict[str, float]:
    """Worst signed error of the formula against the simulation, in percent of the step.

    Two micro-batches of a peer follow one another, so the slowest peer is that with the longest sum
    of two: a deviation smaller by the square root of two is nearer than that of one micro-batch.
    """
    cases = (("one_micro_batch", 1, 1), ("two_micro_batches", 2, 1), ("two_summed", 2, 2))
    errors: dict[str, list[float]] = {name: [] for name, _, _ in cases}
    for peers, ranks in GROUPS[::2] if quick else GROUPS:
        for jitter in (0.05, 0.2):
            for name, m, summed in cases:
                where = afd(peers, ranks, ranks, m, 96)
                noise = Disturbance(attn_jitter=jitter, start_spread=0)
                found = simulate(QWEN, where, noise, Options(num_steps=4, warm_steps=1))
                wanted_us = _with_barrier_us(where, jitter / summed**0.5, peers)
                errors[name].append(100 * (wanted_us / found.step.mean_us - 1))
    return {name: round(max(each, key=abs), 2) for name, each in errors.items()}


def _with_barrier_us(where: Deployment, jitter: float, peers: int) -> float:
    predicted = predict(QWEN, where)
    stages = predicted.stages
    floor_us = stages.mlp_us if where.micro_batches > 1 else 0.0
    pipeline = Pipeline(
        attn_us=gaussian_barrier_us(floor_us, stages.attn_us, jitter * stages.attn_us, peers),
        mlp_us=stages.mlp_us,
        exchange_us=stages.exchange_us,
        num_layers=QWEN.shape.num_moe_layers,
        num_micro_batches=where.micro_batches,
    )
    return predicted.outside_layers_us + pipeline.layers_us


def predicted_jitter(quick: bool) -> dict[str, list[float]]:
    """Lowest and highest error of `predict --jitter`, in percent of the simulated step."""
    errors: dict[str, list[float]] = {}
    for scenario in list(SCENARIOS.values())[: 1 if quick else None]:
        for peers, ranks in GROUPS[::2] if quick else GROUPS:
            for m, jitter in ((1, 0.05), (1, 0.2), (2, 0.05), (2, 0.2), (3, 0.05), (4, 0.05)):
                where = afd(peers, ranks, ranks, m, 96)
                noise = Disturbance(attn_jitter=jitter, start_spread=0)
                found = simulate(scenario, where, noise, Options(num_steps=3, warm_steps=1))
                wanted_us = predict(replace(scenario, jitter=jitter), where).step_us
                error = round(100 * (wanted_us / found.step.mean_us - 1), 2)
                errors.setdefault(f"m{m}_{jitter:g}", []).append(error)
    return {name: [min(each), max(each)] for name, each in errors.items()}


def short_cuts(quick: bool) -> dict[str, float]:
    """Error of the throughput against queues as in the real system."""
    where, errors = afd(28, 4, 4, 2, 96), {}
    options = Options(num_steps=4 if quick else 20, warm_steps=2)
    for name, noise in (
        ("typical", TYPICAL),
        ("prefill_2_pct", replace(TYPICAL, prefill_per_step=0.02)),
    ):
        short = simulate(QWEN, where, noise, options)
        literal = simulate(QWEN, where, noise, replace(options, is_literal=True))
        ratio = short.tokens_per_s_per_gpu / literal.tokens_per_s_per_gpu
        errors[f"{name}_pct"] = round(100 * (ratio - 1), 4)
    return errors


def replayed() -> dict[str, float]:
    """Errors of replayed decode steps."""
    files = sorted(TIMELINES.glob("*.gz"))
    recording = read_recording([read_timeline(path) for path in files], WARM_STEPS)
    answer = {}
    for name, as_recorded in (("as_recorded", True), ("means", False)):
        found = replay(recording, as_recorded=as_recorded)
        answer[f"{name}_mean_pct"] = round(found.mean_percent, 2)
        answer[f"{name}_median_abs_pct"] = round(found.median_abs_percent, 2)
        answer[f"{name}_p90_abs_pct"] = round(found.p90_abs_percent, 2)
    return answer


def timed(noise: Disturbance, options: Options) -> dict[str, Any]:
    """72 GPUs an instance."""
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    found: Simulated = simulate(QWEN, afd(64, 8, 8, 2, 96), noise, options)
    took_s = time.perf_counter() - began_s
    return {
        "gpus": found.num_servers + found.num_ranks,
        "groups": found.num_groups,
        "steps": options.num_steps + options.warm_steps,
        "processes": options.num_processes,
        "wall_s": round(took_s, 2),
        "cpu_s": round(_cpu_s() - began_cpu_s, 2),
        "events_per_s": round(found.num_events / took_s),
        "step_p50_ms": round(found.step.p50_us / 1000, 2),
        "step_p99_ms": round(found.step.p99_us / 1000, 2),
        "tokens_per_s_per_gpu": round(found.tokens_per_s_per_gpu, 1),
    }


def _cpu_s() -> float:
    """Of this process and those that it started; a busy machine changes it less than the wall."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Fewer cases, no 1024 GPUs.")
    args = parser.parse_args(argv)
    noise = replace(TYPICAL, prefill_per_step=0.005)
    result = {
        "benchmark": "simulator",
        "commit": commit(),
        "hardware": cpu_name(),
        "closed_form": closed_form(args.quick),
        "gaussian_barrier_worst_pct": barrier(args.quick),
        "predicted_jitter_pct": predicted_jitter(args.quick),
        "short_cuts": short_cuts(args.quick),
        "replay": replayed(),
        "one_instance": timed(noise, Options(num_steps=5 if args.quick else 10)),
    }
    if not args.quick:
        options = Options(num_steps=5, warm_steps=2, instances=15, num_processes=2)
        result["fifteen_instances"] = timed(noise, options)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
