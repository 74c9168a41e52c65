"""The step benchmark's command line."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from step import models
from step.cases import FIRST_BLOCK_S, Setup, check_divides, parse_cases

BFLOAT16_BOUND = 0.05  # of logits, see step/logits.py
# What makes two deployments differ; all else is of both sides, or of the whole run.
OF_VARIANT = frozenset(
    {
        *("cases", "attn", "mlp", "micro_batches", "rounds", "wait_policy", "dispatch_dtype"),
        *("sm_share", "no_mps", "attn_flags", "mlp_flags"),
    }
)


def parse(argv: Sequence[str], description: str) -> list[argparse.Namespace]:
    """Read the command line: as it is, and as each `--also` changes it.

    The shape's own settings fill what was not given.
    """
    parser = _parser(description)
    first = _parse(parser, argv)
    others = []
    for changes in first.also:
        other = _parse(parser, [*argv, *shlex.split(changes)])
        changed = {name for name, value in vars(first).items() if vars(other)[name] != value}
        if refused := sorted(changed - OF_VARIANT):
            flags = ", ".join("--" + name.replace("_", "-") for name in refused)
            parser.error(f"--also {changes!r}: no {flags} within it; give that to the whole run")
        others.append(other)
    return [first, *others]


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=sorted(models.MODELS), default="qwen3-30b")
    add("--model-path", default="", help="A checkpoint, instead of a shape with weights by seed.")
    add("--layers", type=int, default=0, help="Instead of the shape's own.")
    add("--dtype", default="", help="Instead of the shape's own, e.g. bfloat16.")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--cases", default="", help="batch x context with commas, e.g. 64x1024,128x2048.")
    add("--blocks", type=int, default=0, help="Turns of both sides; default: 5.")
    add("--steps", type=int, default=0, help="Timed steps of a case in a block; default: 20.")
    add("--quick", action="store_true", help="Two blocks of four steps.")
    add("--attn", type=int, default=1, help="Attention servers; they share the batch.")
    add("--mlp", type=int, default=1, help="MLP ranks.")
    add("--micro-batches", default="1", help="As --afd-num-micro-batches.")
    add("--rounds", choices=("on", "off"), default="on")
    add("--wait-policy", choices=("auto", "poll", "memop"), default="auto")
    add("--attention-backend", default="", help="Default: fa3; torch_native on a CPU.")
    add("--moe-runner-backend", default="", help="Of both sides; default: the shape's own.")
    add("--dispatch-dtype", choices=("auto", "fp8"), default="auto", help="Of rows on their way.")
    add("--sm-share", default="", metavar="A,M", help="Percent of the SMs for each role; no limit.")
    add("--no-mps", action="store_true", help="Split roles without an MPS daemon.")
    add("--context", choices=("cached", "prefilled"), default="cached")
    add("--profile", action="store_true", help="Kernel times of both sides, after the timed part.")
    add("--logits-bound", type=float, default=0.0, help="Default: the shape's own.")
    for side in ("colocated", "attn", "mlp"):
        add(f"--{side}-flags", default="", help="More of its flags, in one string.")
    add(
        "--also",
        action="append",
        default=[],
        metavar="FLAGS",
        help="One more deployment, against the same blocks of stock SGLang: what is different, in "
        "one string, e.g. '--attn 2 --rounds off'. Any number of times.",
    )
    add(
        "--block-timeout",
        type=float,
        default=150.0,
        help="Seconds of a block, loading included; the first of each kind may take "
        f"{FIRST_BLOCK_S:g} more, for compiling kernels.",
    )
    add("--time-limit", type=float, default=0.0, help="Start no turn of blocks that ends later.")
    add("--commit", default="", help="Where the working tree has no repository.")
    add("--out", type=Path, help="Append the lines to this file.")
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    args = parser.parse_args(argv)
    try:
        args.cases = parse_cases(args.cases or models.MODELS[args.model].cases)
        check_divides(args.cases, args.attn)
    except ValueError as error:
        parser.error(str(error))
    _fill_defaults(args)
    return args


def _fill_defaults(args: argparse.Namespace) -> None:
    model = models.MODELS[args.model]
    args.blocks = args.blocks or (2 if args.quick else 5)
    args.steps = args.steps or (4 if args.quick else 20)
    if args.model == "tiny" and not args.dtype:  # FA3 has no float32
        args.dtype = "float32" if args.device == "cpu" else "bfloat16"
    if args.dtype == "bfloat16":
        args.logits_bound = args.logits_bound or BFLOAT16_BOUND
    args.attention_backend = args.attention_backend or (
        "torch_native" if args.device == "cpu" else "fa3"
    )
    args.logits_bound = args.logits_bound or model.logits_bound
    args.moe_runner_backend = args.moe_runner_backend or model.moe_runner_backend


def model_of(args: argparse.Namespace, directory: Path) -> str:
    """Where the model is; the shape's files are written into `directory`."""
    return args.model_path or str(
        models.write_model(
            directory / "model", args.model, num_layers=args.layers, dtype=args.dtype
        )
    )


def setup_of(args: argparse.Namespace, model_path: str) -> Setup:
    """What the blocks of one deployment need to know."""
    return Setup(
        model=args.model_path or args.model,
        model_path=model_path,
        is_dummy=not args.model_path,
        device=args.device,
        dtype=args.dtype,
        num_attn=args.attn,
        num_mlp=args.mlp,
        micro_batches=args.micro_batches,
        rounds=args.rounds,
        wait_policy=args.wait_policy,
        attention_backend=args.attention_backend,
        moe_runner_backend=args.moe_runner_backend,
        dispatch_dtype=args.dispatch_dtype,
        sm_share=args.sm_share,
        with_mps=not args.no_mps,
        context_kind=args.context,
        steps=args.steps,
        warm_steps=1 if args.quick else 4,
        profile_steps=_profile_steps(args),
        colocated_flags=tuple(args.colocated_flags.split()),
        attn_flags=tuple(args.attn_flags.split()),
        mlp_flags=tuple(args.mlp_flags.split()),
    )


def _profile_steps(args: argparse.Namespace) -> int:
    # Several servers are out of step with each other in their first one.
    return 0 if not args.profile else 3 if args.attn == 1 else 8
