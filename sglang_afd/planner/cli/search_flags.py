"""The flags of what is searched."""

from __future__ import annotations

import argparse

from sglang_afd.errors import ConfigError
from sglang_afd.planner.cli.deployment_flags import add_kernels_argument, read_kernels
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.search import MICRO_BATCHES, Space


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that `read_space` reads."""
    group = parser.add_argument_group("Search")
    group.add_argument(
        "--max-gpus",
        metavar="G",
        type=int,
        help="GPUs of one deployment, at most. Default: those of one host.",
    )
    group.add_argument(
        "--expert-parallel",
        metavar="N,N,...",
        help="GPUs that share one copy of the experts. Default: every divisor of their number.",
    )
    group.add_argument(
        "--micro-batches",
        metavar="M,M,...",
        help="to try. Default: 1,2,3,4.",
    )
    add_kernels_argument(group)


def read_space(args: argparse.Namespace, scenario: Scenario) -> Space:
    """Raises: ConfigError."""
    micro_batches = _numbers("--micro-batches", args.micro_batches) or MICRO_BATCHES
    if max(micro_batches) > max(MICRO_BATCHES):
        raise ConfigError(f"--micro-batches {args.micro_batches}: wanted 1 to 4")
    return Space(
        max_gpus=scenario.gpu.gpus_per_node if args.max_gpus is None else args.max_gpus,
        expert_parallel=_numbers("--expert-parallel", args.expert_parallel),
        micro_batches=micro_batches,
        expert_kernels=read_kernels(args.kernels),
    )


def _numbers(flag: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{flag} {text}: wanted whole numbers with commas between them"
        ) from error
