"""python -m sglang_afd.planner profile: measures a profile with stock SGLang on this device."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sglang_afd.errors import ConfigError
from sglang_afd.planner.decode import decode
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.hf_config import read_shape
from sglang_afd.planner.profile import Profile, profile_text, write_profile
from sglang_afd.planner.profiling import devices
from sglang_afd.planner.profiling.cases import CPU_CASES, GPU_CASES, Plan, parse_cases
from sglang_afd.planner.profiling.devices import Device
from sglang_afd.planner.shape import ModelShape

if TYPE_CHECKING:
    from sglang_afd.planner.profiling.session import Session, Wanted

_COVERED_QUANTIZATION = ("fp8",)
_MEMORY_FRACTION = "0.88"  # bounds the cache, which --cases size
_ROOM_BYTES = 3 * 2**30  # graphs, activations and CUDA itself, on a GPU
_OURS = ("--model-path", "--device", "--load-format", "--max-total-tokens", "--quantization")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--model-path", default="", help="A checkpoint; default: the embedded model.")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--load-format", default="auto", help="As SGLang's; dummy makes random weights.")
    add("--cases", default="", metavar="BxC,...", help="Batch x context, e.g. 64x1024,128x2048.")
    add("--blocks", type=int, default=3, help="Turns through all cases; default: 3.")
    add("--steps", type=int, default=10, help="Timed steps of a case in a block; default: 10.")
    add("--warm-steps", type=int, default=4, help="Before them; default: 4.")
    add("--attention-backend", default="", help="As SGLang's; default: its choice.")
    add("--sglang-flags", default="", metavar="'--X ...'", help="More of SGLang's flags.")
    add("--gpu", default="", metavar="NAME|FILE", help="Instead of what the driver calls it.")
    add("--name", default="", help="Of the model in the profile; default: its directory.")
    add("--no-expert-calls", action="store_true", help="Leave out the experts by themselves.")
    add("--allow-busy", action="store_true", help="Measure although the GPU is in use.")
    add("--out", type=Path, help="Write the profile there; default: print it.")


def run(args: argparse.Namespace) -> int:
    """Measure and write; returns the exit code."""
    require_sglang()
    kind = args.device if args.device != "auto" else "cuda" if devices.has_gpu() else "cpu"
    plan = _plan(args, kind)
    device = devices.find(kind)
    if not args.allow_busy:
        devices.require_idle(device)
    gpu = _gpu(args.gpu, device)
    with _printing_to_stderr() as output:
        model_path = args.model_path or _embedded_model()
        _check_quantization(model_path, kind)
        shape = replace(_shape(model_path), **({"name": args.name} if args.name else {}))
        _check_room(device, shape, plan, kind)
        flags = _sglang_flags(args, plan, model_path, kind)
        profile = _measure(args, plan, device, gpu, shape, flags)
        if not args.out:
            output.write(profile_text(profile))
    return 0


def require_sglang(package: str = "sglang") -> None:
    """Refuse before anything else does.

    Raises: ConfigError.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            "profile measures SGLang, which is not installed; use the environment of `make env` on "
            "a CPU, of `pip install .` on a GPU. All other commands do without"
        )


def _measure(
    args: argparse.Namespace,
    plan: Plan,
    device: Device,
    gpu: Gpu | None,
    shape: ModelShape,
    flags: Sequence[str],
) -> Profile:
    # SGLang and torch read these when they are imported.
    if device.kind == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")  # minutes, for shapes unused here
    # NOTE: the shim must be imported before anything that imports SGLang.
    from sglang_afd.upstream import cpu_shim, versions

    if device.kind == "cuda" and cpu_shim.IS_CPU:
        raise ConfigError("no CUDA driver can be loaded here; wanted one, or --device cpu")
    versions.check_version()
    from sglang_afd.planner.profiling.session import Session, Wanted

    wanted = Wanted(
        plan=plan,
        shape=shape,
        device=device,
        gpu=gpu,
        flags=tuple(flags),
        has_random_weights=args.load_format == "dummy",
        model_path=args.model_path or "the embedded model",
    )
    return _run_session(args, Session, wanted)


def _run_session(args: argparse.Namespace, session_type: type[Session], wanted: Wanted) -> Profile:
    from sglang_afd.planner.profiling import assemble, report

    session = session_type(wanted, _say)
    profile, cases = session.measure_steps()
    for line in (*report.steps_table(profile), *report.kernel_table(cases[-1])):
        _say(line)
    if refusal := assemble.unmatched_error(cases):
        profile = replace(profile, provenance={**profile.provenance, "refused": refusal})
    if args.out:  # before what else may fail
        write_profile(profile, args.out)
    if refusal:
        raise ConfigError(refusal)
    if not args.no_expert_calls:
        profile = session.measure_experts(profile)
    if args.out:
        write_profile(profile, args.out)
    for name, error in report.errors_pct(profile):
        _say(f"{name}: predicted from this profile {error:+.1f} %")
    return profile


def _plan(args: argparse.Namespace, kind: str) -> Plan:
    return Plan(
        cases=parse_cases(args.cases or (GPU_CASES if kind == "cuda" else CPU_CASES)),
        blocks=args.blocks,
        steps=args.steps,
        warm_steps=args.warm_steps,
    )


def _gpu(name: str, device: Device) -> Gpu | None:
    if device.kind == "cpu":
        return None
    if name.endswith(".json"):
        try:
            data = json.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--gpu {name}: no readable JSON ({error})") from error
        described = decode(Gpu, data, name)
        assert isinstance(described, Gpu), "decode returns what it was asked for"
        return described
    return devices.describe_gpu(device, name)


def _embedded_model() -> str:
    # In a process of its own: who builds models is no part of the planner.
    done = subprocess.run(
        [sys.executable, "-m", "sglang_afd.demo"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ConfigError("the embedded model cannot be built (see above); give --model-path")
    return done.stdout.strip().splitlines()[-1]


def _config(model_path: str) -> Mapping[str, Any]:
    file = Path(model_path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: no readable config.json ({error}); --model-path wants a local directory"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: holds a {type(config).__name__}, wanted a JSON object")
    return config


def _shape(model_path: str) -> ModelShape:
    return read_shape(Path(model_path))


def _check_quantization(model_path: str, kind: str) -> None:
    quantization = _config(model_path).get("quantization_config")
    if not quantization:
        return
    method = str(quantization.get("quant_method", "")).lower()
    if method not in _COVERED_QUANTIZATION:
        raise ConfigError(
            f"{model_path} is quantized by {method or 'an unnamed method'}; profile covers "
            f"unquantized models and {', '.join(_COVERED_QUANTIZATION)}, whose kernels it can name"
        )
    if kind == "cpu":
        raise ConfigError(f"{model_path} is quantized by {method}, which needs a GPU")


def _check_room(device: Device, shape: ModelShape, plan: Plan, kind: str) -> None:
    cache = plan.pool_tokens * shape.kv_bytes_per_token
    weights = shape.all_dense_bytes + shape.all_expert_bytes
    room = _ROOM_BYTES if kind == "cuda" else 0.5 * _ROOM_BYTES
    what = (
        f"model {shape.name} ({weights / 2**30:.1f} GiB) with the cache of --cases "
        f"({cache / 2**30:.1f} GiB)"
    )
    devices.require_room(device, weights + cache + room, what)


def _sglang_flags(args: argparse.Namespace, plan: Plan, model_path: str, kind: str) -> list[str]:
    extra = shlex.split(args.sglang_flags)
    taken = [flag for flag in extra if flag.partition("=")[0] in _OURS]
    if taken:
        raise ConfigError(f"--sglang-flags has {taken[0]}, which profile sets itself")
    backend = args.attention_backend or ("torch_native" if kind == "cpu" else "")
    flags = [
        *("--model-path", model_path, "--load-format", args.load_format, "--device", kind),
        *(("--attention-backend", backend) if backend else ()),
        *("--sampling-backend", "pytorch", "--random-seed", "1", "--log-level", "warning"),
        *("--max-total-tokens", str(plan.pool_tokens), "--disable-radix-cache"),
        *("--max-running-requests", str(plan.batches[-1] + 1)),
        *("--mem-fraction-static", _MEMORY_FRACTION),
    ]
    if kind == "cuda":
        flags += ["--cuda-graph-bs-decode", *map(str, plan.batches)]
        flags += ["--cuda-graph-backend-prefill", "disabled"]
    return [*flags, *extra]


@contextmanager
def _printing_to_stderr() -> Iterator[TextIO]:
    """SGLang prints to standard output, which is to hold the profile and nothing else."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as output:
            yield output
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
