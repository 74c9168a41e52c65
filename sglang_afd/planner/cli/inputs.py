"""The flags that every command shares: model, GPU, where constants come from, workload."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks
from sglang_afd.planner.cli import sources
from sglang_afd.planner.cli.lengths import read_lengths
from sglang_afd.planner.cli.sources import Source
from sglang_afd.planner.decode import decode
from sglang_afd.planner.deployment import Workload
from sglang_afd.planner.fit import Fit
from sglang_afd.planner.gpu import GPUS, Gpu, known_gpu
from sglang_afd.planner.hf_config import read_shape
from sglang_afd.planner.json_file import read_json
from sglang_afd.planner.known_models import CONFIGS, known_shape
from sglang_afd.planner.memory import USABLE_FRACTION
from sglang_afd.planner.scenario import MOST_JITTER, MOST_JITTER_OF_MANY, Scenario
from sglang_afd.planner.shape import ModelShape

_KV_BYTES = {"fp8": 1.0, "bf16": 2.0}
_SOURCES = ("auto", "profile", "aiconfigurator", "roofline")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a command works on; `scenario` already has the fitted constants."""

    scenario: Scenario
    fitted: Fit
    source: Source  # where the constants come from, for people to read

    @property
    def model_noise(self) -> float:
        """What constants cannot show of a step's error, as a relative standard deviation."""
        return self.source.model_noise(self.scenario.shape, self.scenario.gpu)


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag that `read_inputs` reads."""
    group = parser.add_argument_group("Model, GPU and workload")
    add = group.add_argument
    models = ", ".join(sorted(CONFIGS))
    add(
        "--model",
        metavar="PATH|NAME",
        help="config.json of a model, or a folder with one, or one of: "
        f"{models} (-FP8 behind it for FP8 weights). Default: that of the profile.",
    )
    add(
        "--gpu",
        metavar="NAME|FILE",
        help=f"one of {', '.join(GPUS)}, or a JSON file with the fields of planner.gpu.Gpu. "
        "Default: that of the profile.",
    )
    add(
        "--profile",
        metavar="FILE",
        type=Path,
        help="what `profile` wrote, or a collection of measured steps; constants are fitted to it.",
    )
    add(
        "--source",
        metavar="|".join(_SOURCES),
        default="auto",
        help="where constants come from. auto: --profile where it is given, else the tables of "
        "aiconfigurator-core where it is installed and has the GPU, else the roofline: data sheets "
        "and priors, with nothing measured. Default: auto.",
    )
    add("--context", metavar="TOKENS", type=float, help="mean tokens that a request holds.")
    add(
        "--context-std",
        metavar="TOKENS",
        type=float,
        default=0.0,
        help="standard deviation of that between requests; the slowest peer is waited for. "
        "Default: 0.",
    )
    add(
        "--lengths",
        metavar="FILE",
        type=Path,
        help="prompt and decode tokens of finished requests, one `PROMPT,DECODE` a line; gives "
        "--context and --context-std.",
    )
    add(
        "--max-tpot",
        metavar="MS",
        type=float,
        help="limit on the time per output token, milliseconds. Default: none.",
    )
    add(
        "--verify-tokens",
        metavar="N",
        type=int,
        default=1,
        help="new tokens of a request in a step; above 1 for speculative decoding. Default: 1.",
    )
    add(
        "--accepted-tokens",
        metavar="X",
        type=float,
        default=1.0,
        help="mean tokens of them that are kept, 1 to --verify-tokens. Default: 1.",
    )
    add(
        "--kv-dtype",
        metavar="bf16|fp8",
        help="of the cache. Default: as in the profile; bf16 without one.",
    )
    add(
        "--colocated-pieces",
        metavar="TOKENS",
        type=int,
        help="tokens of a GPU that the colocated system runs through its experts at once; a larger "
        "batch goes in pieces. 256 for vLLM with its low-latency dispatch. Default: any number, as "
        "in SGLang.",
    )
    add(
        "--memory-fraction",
        metavar="X",
        type=float,
        default=USABLE_FRACTION,
        help="share of a GPU's memory for weights, buffers and cache. "
        f"Default: {USABLE_FRACTION:g}.",
    )


def add_jitter_argument(parser: argparse._ActionsContainer) -> None:
    """How unsteady a GPU is, for commands that know no other noise."""
    parser.add_argument(
        "--jitter",
        metavar="X",
        type=float,
        default=0.0,
        help="standard deviation of a GPU's time for the attention of one layer, over its mean: "
        "0.05 for 5 %%. The others wait for the slowest. Up to "
        f"{MOST_JITTER:g}; with 3 or 4 micro-batches up to {MOST_JITTER_OF_MANY:g}. Default: 0.",
    )


def read_inputs(args: argparse.Namespace) -> Inputs:
    """Check and read what the flags of `add_input_arguments` say.

    Raises: ConfigError, naming the flag, or the file and the field.
    """
    if args.source not in _SOURCES:
        raise ConfigError(f"--source {args.source}: wanted one of {', '.join(_SOURCES)}")
    if (args.source == "profile") > (args.profile is not None):
        raise ConfigError("--source profile: no --profile FILE; give the file that it should read")
    if args.profile is not None and args.source not in ("auto", "profile"):
        raise ConfigError(
            f"--source {args.source} and --profile {args.profile}: leave one of the two out"
        )
    measured = sources.open_file(args.profile) if args.profile else None
    shape = _shape(args, measured.shape if measured else None)
    gpu = _gpu(args.gpu, measured.gpu if measured else None)
    workload = read_workload(args)
    source = measured or sources.without_a_file(args.source, shape, gpu)
    fitted = source.fitted()
    scenario = Scenario(
        shape=shape,
        gpu=gpu,
        workload=workload,
        constants=fitted.constants,
        routing=source.routing_for(shape),
        usable_memory_fraction=_fraction(args.memory_fraction),
        colocated_piece_tokens=_pieces(args.colocated_pieces),
        jitter=args.jitter,
    )
    return Inputs(scenario=scenario, fitted=fitted, source=source)


def read_workload(args: argparse.Namespace) -> Workload:
    """The workload alone."""
    if (args.context is None) == (args.lengths is None):
        raise ConfigError("workload: give one of --context TOKENS and --lengths FILE")
    if args.lengths is not None and args.context_std:
        raise ConfigError("--context-std: --lengths FILE gives it; leave it out")
    context, deviation = args.context, args.context_std
    if args.lengths is not None:
        load = read_lengths(args.lengths)
        context, deviation = load.mean_tokens, load.std_tokens
    checks.between("--context", "the number of tokens", context, 1, 1e8, "Wanted: tokens.")
    if args.max_tpot is not None:
        hint = "Wanted: milliseconds, 50 for 50 ms."
        checks.between("--max-tpot", "the limit", args.max_tpot, 0.5, 5000, hint)
    return Workload(
        context_tokens=context,
        context_std_tokens=deviation,
        verify_tokens=args.verify_tokens,
        accepted_tokens=args.accepted_tokens,
        max_tpot_us=None if args.max_tpot is None else args.max_tpot * 1000,
    )


def read_gpu(name: str) -> Gpu:
    """One of the list, or described in a JSON file."""
    path = Path(name)
    if path.suffix != ".json":
        return known_gpu(name)
    gpu = decode(Gpu, read_json(path, "JSON", "--gpu"), name)
    assert isinstance(gpu, Gpu), "decode returns what it was asked for"
    return gpu


def read_model(name: str) -> ModelShape:
    """A path that exists, or one of the list."""
    path = Path(os.path.expanduser(name))  # which leaves alone what has no home directory
    is_path = os.path.exists(path) or path.suffix == ".json" or name.startswith((".", "/", "~"))
    return read_shape(path) if is_path else known_shape(name)


def _shape(args: argparse.Namespace, measured: ModelShape | None) -> ModelShape:
    if args.kv_dtype is not None and args.kv_dtype not in _KV_BYTES:
        raise ConfigError(f"--kv-dtype {args.kv_dtype}: wanted one of {', '.join(_KV_BYTES)}")
    shape = read_model(args.model) if args.model else measured
    if shape is None:
        raise ConfigError("no --model; give the path of its config.json, or a name from --help")
    if args.kv_dtype is not None:
        return replace(shape, kv_element_bytes=_KV_BYTES[args.kv_dtype])
    # The cache's width is a setting of the service, so it holds for another model, too.
    return shape if measured is None else replace(shape, kv_element_bytes=measured.kv_element_bytes)


def _gpu(name: str | None, measured: Gpu | None) -> Gpu:
    gpu = read_gpu(name) if name else measured
    if gpu is None:
        raise ConfigError(f"no --gpu; give one of {', '.join(GPUS)}, or a JSON file")
    return gpu


def _pieces(value: int | None) -> int | None:
    if value is not None:
        checks.whole("--colocated-pieces", "the number of tokens", value)
    return value


def _fraction(value: float) -> float:
    if not 0 < value <= 1:
        raise ConfigError(f"--memory-fraction {value:g}: wanted above 0 and at most 1; 0.9 is 90 %")
    return value
