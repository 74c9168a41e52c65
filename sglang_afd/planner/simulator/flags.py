"""The flags of `simulate` that are not those of every command."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace
from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks
from sglang_afd.planner.simulator.disturbance import QUIET, TYPICAL, Disturbance, Failure, Lost
from sglang_afd.planner.simulator.simulation import Options
from sglang_afd.planner.simulator.timeline import Span

_NOISE = {"none": QUIET, "typical": TYPICAL}
_SHARES = {
    "attn_jitter": "each layer and micro-batch of attention",
    "mlp_jitter": "each run on each MLP GPU",
    "exchange_jitter": "each way of each exchange",
    "gap_jitter": "what lies between two steps",
    "prefill_per_step": "",
    "stall_per_step": "",
}
_FAILURE = re.compile(r"(mlp|attention):(\d{1,9}):(\d{1,9})@(\d+\.?\d*)(?:\+(\d+\.?\d*))?")


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that `read_disturbance` and `read_options` read, and those of replays."""
    group = parser.add_argument_group("Simulation")
    add = group.add_argument
    add("--steps", metavar="N", type=int, default=20, help="that are measured. Default: 20.")
    add(
        "--warm-steps",
        metavar="N",
        type=int,
        default=3,
        help="before them, until the first rounds have found together. Default: 3.",
    )
    add("--seed", metavar="N", type=int, default=1, help="of everything drawn. Default: 1.")
    add(
        "--instances",
        metavar="N",
        type=int,
        default=1,
        help="of the deployment, each with its own copies of the experts. Default: 1.",
    )
    add(
        "--processes",
        metavar="N",
        type=int,
        help="that play groups side by side. Default: the number of cores.",
    )
    add(
        "--rounds",
        metavar="on|off",
        default="on",
        help="off: first come, first served. Default: on.",
    )
    add(
        "--noise",
        metavar="|".join(_NOISE),
        default="none",
        help="typical: 5 %% attention, 3 %% experts, 15 %% exchange, 15 %% gaps. Default: none.",
    )
    for name in ("attn_jitter", "mlp_jitter", "exchange_jitter", "gap_jitter"):
        add(
            f"--{name.replace('_', '-')}",
            metavar="SHARE",
            type=float,
            help=f"standard deviation of {_SHARES[name]}; 0.05 is 5 %%. Default: that of --noise.",
        )
    add(
        "--prefill-per-step",
        metavar="SHARE",
        type=float,
        help="probability that a decode step is followed by a prefill. Default: 0.",
    )
    add(
        "--prefill-tokens",
        metavar="LOW-HIGH",
        help="tokens of a prefill. Default: 512-2048.",
    )
    add(
        "--stall-per-step",
        metavar="SHARE",
        type=float,
        help="probability that a server hangs for 50 to 200 ms in a step. Default: 0.",
    )
    add(
        "--fail",
        metavar="ROLE:GROUP:INDEX@MS[+MS]",
        action="append",
        default=[],
        help="a server that is lost, mlp or attention, when, and after what time it is attached "
        "again: mlp:0:2@400+500. May be given more than once.",
    )
    add(
        "--timeline",
        metavar="FILE",
        type=Path,
        help="write what ran when in the first measured step of the first group, for Perfetto.",
    )
    add(
        "--replay",
        metavar="FILE",
        type=Path,
        nargs="+",
        help="play timelines of real servers (--afd-trace) instead; all but --json and the next "
        "flag is ignored then.",
    )
    add(
        "--skip-steps",
        metavar="N",
        type=int,
        default=0,
        help="of each server in timelines: those that warm up. Default: 0.",
    )


def read_disturbance(args: argparse.Namespace) -> Disturbance:
    """Raises: ConfigError."""
    if args.noise not in _NOISE:
        raise ConfigError(f"--noise {args.noise}: wanted one of {', '.join(_NOISE)}")
    given = {name: getattr(args, name) for name in _SHARES if getattr(args, name) is not None}
    failures = tuple(_failure(text) for text in args.fail)
    disturbance = replace(_NOISE[args.noise], failures=failures, **given)
    if args.prefill_tokens is None:
        return disturbance
    match = re.fullmatch(r"(\d+)-(\d+)", args.prefill_tokens)
    if match is None:
        raise ConfigError(f"--prefill-tokens {args.prefill_tokens}: wanted LOW-HIGH, as 512-2048")
    return replace(disturbance, prefill_tokens=(int(match[1]), int(match[2])))


def read_options(args: argparse.Namespace) -> Options:
    """Raises: ConfigError."""
    if args.rounds not in ("on", "off"):
        raise ConfigError(f"--rounds {args.rounds}: wanted on or off")
    checks.whole("--steps", "the number", args.steps)
    return Options(
        num_steps=args.steps,
        warm_steps=args.warm_steps,
        seed=args.seed,
        instances=args.instances,
        has_rounds=args.rounds == "on",
        num_processes=(os.cpu_count() or 1) if args.processes is None else args.processes,
        span=Span(first_step=args.warm_steps) if args.timeline else None,
    )


def _failure(text: str) -> Failure:
    match = _FAILURE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--fail {text}: wanted ROLE:GROUP:INDEX@MS or ROLE:GROUP:INDEX@MS+MS with ROLE mlp or "
            "attention, as mlp:0:2@400+500"
        )
    role, group, index, at_ms, back_ms = match.groups()
    return Failure(
        lost=Lost(role),
        group=int(group),
        index=int(index),
        at_us=float(at_ms) * 1000,
        back_after_us=None if back_ms is None else float(back_ms) * 1000,
    )
