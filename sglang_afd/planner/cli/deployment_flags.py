"""The flags of one deployment, and of what it is compared with."""

from __future__ import annotations

import argparse

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode
from sglang_afd.planner.memory import plan_memory
from sglang_afd.planner.predict import Prediction, predict
from sglang_afd.planner.scenario import Scenario, check_experts
from sglang_afd.planner.search import Space, best_batch, search_colocated
from sglang_afd.planner.site import Site

_MODES = {mode.value: mode for mode in Mode}
KERNELS = {kernels.value: kernels for kernels in ExpertKernels}


def add_kernels_argument(parser: argparse._ActionsContainer) -> None:
    """Which expert kernels a disaggregated deployment has."""
    parser.add_argument(
        "--kernels",
        metavar="|".join(KERNELS),
        default=ExpertKernels.GROUPED.value,
        help="of disaggregated experts. grouped: those of a colocated system, with an exchange "
        "before and after, as sglang-afd runs them. fused: one persistent kernel with the exchange "
        "inside, as FastAFD's MegaMoE; part of its gain is the kernel's. Default: grouped.",
    )


def add_deployment_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that `read_deployment` and `read_baseline` read."""
    group = parser.add_argument_group("Deployment")
    group.add_argument(
        "--mode",
        metavar="|".join(_MODES),
        default=Mode.AFD.value,
        help="afd: the experts apart. core_only: only core attention and the cache apart. "
        "colocated: nothing apart. Default: afd.",
    )
    group.add_argument("--attn-gpus", metavar="A", type=int, help="attention GPUs, or all GPUs.")
    group.add_argument("--mlp-gpus", metavar="F", type=int, default=0, help="MLP GPUs.")
    group.add_argument(
        "--expert-parallel",
        metavar="N",
        type=int,
        help="GPUs that share one copy of the experts. Default: all that have experts.",
    )
    group.add_argument(
        "--micro-batches", metavar="M", type=int, help="1 to 4. Default: 2, colocated 1."
    )
    group.add_argument(
        "--batch",
        metavar="B",
        type=int,
        help="requests of an attention GPU. Default: as many as fit and keep --max-tpot.",
    )
    add_kernels_argument(group)
    base = parser.add_argument_group("What it is compared with")
    base.add_argument(
        "--baseline-expert-parallel",
        metavar="N",
        type=int,
        help="colocated GPUs that share one copy of the experts. Default: the best of all.",
    )
    base.add_argument(
        "--baseline-batch",
        metavar="B",
        type=int,
        help="requests of a colocated GPU. Default: the best that fits.",
    )
    base.add_argument(
        "--max-gpus",
        metavar="G",
        type=int,
        help="GPUs of the best colocated deployment, at most. Default: as many as the deployment "
        "has, at least those of one host.",
    )


def read_kernels(name: str) -> ExpertKernels:
    """Raises: ConfigError."""
    if name not in KERNELS:
        raise ConfigError(f"--kernels {name}: wanted one of {', '.join(KERNELS)}")
    return KERNELS[name]


def read_deployment(args: argparse.Namespace, scenario: Scenario) -> Prediction:
    """The deployment that the flags name, with its batch, predicted.

    Raises: ConfigError, for counts that cannot be and for what does not fit into memory.
    """
    if args.mode not in _MODES:
        raise ConfigError(f"--mode {args.mode}: wanted one of {', '.join(_MODES)}")
    if args.attn_gpus is None:
        raise ConfigError("no --attn-gpus; give the number of attention GPUs")
    mode = _MODES[args.mode]
    colocated = mode is Mode.COLOCATED
    micro_batches = args.micro_batches if args.micro_batches is not None else 1 if colocated else 2
    if micro_batches > 4:
        raise ConfigError(f"--micro-batches {micro_batches}: wanted 1 to 4")
    default_width = args.attn_gpus if colocated else args.mlp_gpus
    width = default_width if args.expert_parallel is None else args.expert_parallel
    deployment = Deployment(
        mode=mode,
        attn_gpus=args.attn_gpus,
        mlp_gpus=args.mlp_gpus,
        expert_parallel=max(width, 1) if args.expert_parallel is None else width,
        micro_batches=micro_batches,
        batch_per_attn_gpu=max(micro_batches, 1) if args.batch is None else args.batch,
        expert_kernels=read_kernels(args.kernels),
    )
    return _predicted(scenario, deployment, args.batch is None)


def read_baseline(args: argparse.Namespace, scenario: Scenario, total_gpus: int) -> Prediction:
    """The colocated deployment that the flags name, or the best one.

    Raises: ConfigError, when none fits.
    """
    if args.baseline_expert_parallel is None:
        most = args.max_gpus
        if most is None:
            most = max(total_gpus, scenario.gpu.gpus_per_node)
        best = search_colocated(Site(scenario=scenario), Space(max_gpus=most)).best
        if best is None:
            raise ConfigError(
                f"baseline: {scenario.shape.name} fits no colocated deployment of up to {most} "
                f"{scenario.gpu.name} within the limits; allow more with --max-gpus"
            )
        if args.baseline_batch is None:
            return best
        deployment = best.deployment.with_batch(args.baseline_batch)
    else:
        deployment = Deployment(
            mode=Mode.COLOCATED,
            attn_gpus=args.baseline_expert_parallel,
            expert_parallel=args.baseline_expert_parallel,
            batch_per_attn_gpu=args.baseline_batch or 1,
        )
    return _predicted(scenario, deployment, args.baseline_batch is None)


def _predicted(scenario: Scenario, deployment: Deployment, choose_batch: bool) -> Prediction:
    check_experts(scenario.shape, deployment)
    plan = plan_memory(
        scenario.shape,
        scenario.gpu,
        scenario.workload,
        deployment,
        scenario.usable_memory_fraction,
    )
    plan.require_fit(deployment)
    limit_us = scenario.workload.max_tpot_us
    if not choose_batch:
        prediction = predict(scenario, deployment)
        if limit_us is None or prediction.tpot_us <= limit_us:
            return prediction
    best = best_batch(Site(scenario=scenario), deployment)
    limit = (limit_us or 0) / 1000
    if best is not None and not choose_batch:
        raise ConfigError(
            f"deployment {deployment.label}: {deployment.batch_per_attn_gpu} requests take "
            f"{prediction.tpot_us / 1000:.1f} ms a token, and the limit is {limit:g}; lower the "
            f"batch to {best.deployment.batch_per_attn_gpu}, or raise --max-tpot"
        )
    if best is None:
        raise ConfigError(
            f"deployment {deployment.label}: no batch keeps {limit:g} ms a token; raise --max-tpot"
        )
    return best
