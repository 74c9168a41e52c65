"""A small model on GB200 for tests of the simulator: quick, with all that a large one has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang_afd.planner.deployment import Deployment, Mode, Workload
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.predict import Prediction, predict
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.simulator.disturbance import QUIET, Disturbance
from sglang_afd.planner.simulator.result import Simulated
from sglang_afd.planner.simulator.simulation import Options, simulate

LAYERS = 12


def scenario(context_std: float = 0.0, layers: int = LAYERS) -> Scenario:
    """Qwen3-235B cut to a few layers."""
    shape = replace(
        known_shape("Qwen3-235B-A22B-FP8"),
        num_layers=layers,
        num_moe_layers=layers,
        num_kv_layers=layers,
    )
    workload = Workload(context_tokens=8192, context_std_tokens=context_std)
    return Scenario(shape=shape, gpu=GPUS["GB200"], workload=workload)


def deployment(
    attn: int = 8, mlp: int = 2, width: int | None = None, m: int = 2, batch: int = 64
) -> Deployment:
    """`width` GPUs share a copy of the experts; all of them unless said otherwise."""
    return Deployment(
        mode=Mode.AFD,
        attn_gpus=attn,
        mlp_gpus=mlp,
        expert_parallel=mlp if width is None else width,
        micro_batches=m,
        batch_per_attn_gpu=batch,
    )


def both(
    where: Deployment,
    disturbance: Disturbance = QUIET,
    world: Scenario | None = None,
    **options: object,
) -> tuple[Prediction, Simulated]:
    """The closed form and the simulation of one deployment."""
    world = world or scenario()
    merged = {"num_steps": 6, "warm_steps": 2, **options}
    found = simulate(world, where, disturbance, Options(**merged))  # type: ignore[arg-type]
    return predict(world, where), found


def all_steps(found: Simulated) -> Sequence[float]:
    """Of all servers, flat."""
    return [us for server in found.steps_us for us in server]
