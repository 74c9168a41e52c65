"""Decode steps of stock SGLang and of split roles on the same device, in turn, in one run.

Blocks alternate: stock SGLang alone on the device, then attention and MLP servers under a private
MPS daemon, and again. A block loads its model once and runs every case, batch x context: some steps
to warm up, timed ones with the device idle before and after, and one that counts which experts get
rows. The logits of both sides are compared before anything is timed. The stock side has none of our
hooks, no SM share and no MPS. Weights are made by seed and name, equal on both sides.

Prints one JSON line for each case: `case`, `colocated_ms`, `afd_ms`, `ratio`, and whether it is
`valid`. Goes on when a case or a block fails; the exit code is then 1.

    python benchmark/bench_step.py --model qwen3-30b --out docs/results/bench_step_h200.jsonl
    python benchmark/bench_step.py --model tiny --device cpu --quick
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import provenance
from step import device as devices
from step import kernels, logits, models, plan
from step.arguments import parse, setup_of
from step.blocks import BlockResult, Runner
from step.cases import Case, Setup
from step.fleet import Launcher
from step.summary import line_of, median_step_ms

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # where sglang_afd is not installed
# Of the zygote and of both sides.
ENVIRONMENTS = {
    "cuda": {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"},
    "cpu": {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "5000"},  # as our launcher sets them
}
DISTRIBUTIONS = ("sglang", "torch", "triton", "sglang-kernel", "flashinfer-python", "sgl-deep-gemm")


def main(argv: Sequence[str]) -> int:
    """Measure; returns 1 when something failed or a result is not valid."""
    args = parse(argv, __doc__ or "")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    environment = ENVIRONMENTS[args.device]
    with Launcher(is_dummy=not args.model_path, environment=environment) as launcher:
        setup = setup_of(args, launcher.directory)
        bench = Bench(args, setup, launcher)
        try:
            bench.run()
        finally:  # what was measured is told, however the run ends
            lines = bench.lines()
            for line in lines:
                print(json.dumps(line), flush=True)
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        _partial(args.out).unlink(missing_ok=True)
    return 1 if bench.failures or not all(line.get("valid") for line in lines) else 0


def _partial(out: Path) -> Path:
    """Holds the lines of the blocks so far, for a run that is killed."""
    return out.with_name(out.name + ".partial")


class Bench:
    """Blocks in turn; keeps what was found so far, so that there is always something to show."""

    def __init__(self, args: argparse.Namespace, setup: Setup, launcher: Launcher) -> None:
        self._args = args
        self._setup = setup
        self._cases: list[Case] = args.cases
        self._launcher = launcher
        self._runner = Runner(launcher, setup, self._cases, args.block_timeout)
        self._blocks: dict[str, list[BlockResult]] = {"colocated": [], "afd": []}
        self._logits: dict[str, Any] | None = None
        self._mps = ""
        self._started_s = time.monotonic()
        config = models.read_config(setup.model_path)
        self._num_experts = int(config.get("num_experts") or config["n_routed_experts"])
        self._num_layers = int(config["num_hidden_layers"])
        self.failures: list[str] = []

    def run(self) -> None:
        """Every block, or as many as the time allows."""
        _say(plan.describe(self._setup, self._cases, self._args.blocks))
        ready = self._launcher.wait_ready()
        self._note(f"SGLang imported in {ready['import_s']} s")
        if not ready["can_fork"]:
            self._note("importing SGLang initialised CUDA: every child imports it again")
        for number in range(self._args.blocks):
            if self._is_late():
                self._note(f"--time-limit: {number} of {self._args.blocks} blocks were run")
                break
            self._run_pair(number)

    def _run_pair(self, number: int) -> None:
        is_last = number == self._args.blocks - 1
        options = {
            "with_logits": number == 0,
            "with_profile": is_last and self._setup.profile_steps > 0,
        }
        self._keep("colocated", self._runner.colocated(**options))
        with self._shared_gpu() as environment:
            self._keep("afd", self._runner.afd(environment, **options))
        if number == 0:
            self._compare_logits()
        self._note(f"block {number + 1}: " + "; ".join(map(self._progress, self._cases)))
        if self._args.out:
            text = "".join(json.dumps(line) + "\n" for line in self.lines())
            _partial(self._args.out).write_text(text)

    def _is_late(self) -> bool:
        """Would one more pair of blocks, at the pace so far, end after the limit?"""
        done = len(self._blocks["afd"])
        if not self._args.time_limit or not done:
            return False
        pair_s = sum(
            blocks[-1].facts.get("block_s", 0.0) for blocks in self._blocks.values() if blocks
        )
        return time.monotonic() - self._started_s + 1.1 * pair_s > self._args.time_limit

    @contextlib.contextmanager
    def _shared_gpu(self) -> Iterator[Mapping[str, str]]:
        if self._setup.device == "cpu" or not self._setup.with_mps:
            self._mps = "no"
            yield {}
            return
        from sglang_afd.fleet.mps import private_mps

        with private_mps() as mps:
            self._mps = "no: " + mps.reason if mps.environment is None else "private"
            if not mps.is_private:
                self._mps = "the user's own daemon, which the colocated side finds as well"
            yield mps.environment or {}
        for problem in mps.problems:
            self._note(problem)

    def _keep(self, side: str, result: BlockResult) -> None:
        self._blocks[side].append(result)
        for failure in result.failures:
            self.failures.append(f"{side}: {failure.splitlines()[0]}")
            self._note(f"{side} failed: {failure}")
        self._note(f"{side}: {json.dumps(result.facts)}")

    def _compare_logits(self) -> None:
        files = [blocks[0].logits for blocks in self._blocks.values()]
        if any(file is None or not file.exists() for file in files):
            return
        colocated, afd = (np.load(str(file)) for file in files)
        self._logits = logits.compare(colocated, afd, bound=self._args.logits_bound)
        self._note(f"logits: {json.dumps(self._logits)}")

    def _progress(self, case: Case) -> str:
        medians = []
        for results in self._blocks.values():
            runs = [result.runs[case.name] for result in results if case.name in result.runs]
            medians.append(median_step_ms(runs) if runs else float("nan"))
        return f"{case.name} {medians[0]:.3f} | {medians[1]:.3f} ms ({medians[1] / medians[0]:.3f})"

    def lines(self) -> list[dict[str, Any]]:
        """One for each case, with what failed where it did."""
        return [self._head() | self._line(case) for case in self._cases]

    def _line(self, case: Case) -> dict[str, Any]:
        runs = {
            side: [result.runs[case.name] for result in results if case.name in result.runs]
            for side, results in self._blocks.items()
        }
        if not all(runs.values()):
            return {"case": case.name, "valid": False, "invalid_because": self.failures}
        line = line_of(
            case,
            runs["colocated"],
            runs["afd"],
            num_experts=self._num_experts,
            logits=self._logits,
        )
        profiles = {
            side: results[-1].profiles.get(case.name) for side, results in self._blocks.items()
        }
        if any(profiles.values()):
            line["profile"] = profiles
            line["difference_ms"] = _difference(profiles)
        return line | {
            "blocks": {side: len(blocks) for side, blocks in runs.items()},
            "facts": {
                side: [result.facts for result in results] for side, results in self._blocks.items()
            },
            "failures": self.failures,
        }

    def _head(self) -> dict[str, Any]:
        setup = self._setup
        return {
            "benchmark": "bench_step",
            "date": time.strftime("%Y-%m-%d"),
            "commit": self._args.commit or provenance.commit(),
            "hardware": _hardware(setup.device),
            "versions": _versions(),
            "model": setup.model,
            "dtype": setup.dtype or "auto",
            "num_layers": self._num_layers,
            "weights": "by seed and name" if setup.is_dummy else "of the checkpoint",
            "num_attn": setup.num_attn,
            "num_mlp": setup.num_mlp,
            "micro_batches": setup.micro_batches,
            "rounds": setup.rounds,
            "wait_policy": setup.wait_policy,
            "attention_backend": setup.attention_backend,
            "moe_runner_backend": setup.moe_runner_backend or "auto",
            "sm_share": setup.sm_share or "none",
            "mps": {"afd": self._mps, "colocated": "no"},
            "context_is": setup.context_kind,
            "steps": setup.steps,
            "warm_steps": setup.warm_steps,
            "flags": {
                "colocated": setup.colocated_flags,
                "attn": setup.attn_flags,
                "mlp": setup.mlp_flags,
            },
        }

    def _note(self, text: str) -> None:
        _say(f"[{time.monotonic() - self._started_s:6.1f} s] {text}")


def _difference(profiles: Mapping[str, Any]) -> dict[str, float] | None:
    stock, split = profiles["colocated"] or {}, profiles["afd"] or {}
    if not stock or set(split) != {"attn-0", "mlp-0"}:
        return None  # with more servers their times overlap
    times = (stock["colocated"], split["attn-0"], split["mlp-0"])
    return kernels.difference(*(server["ms"] for server in times))


def _hardware(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "cpu": provenance.cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
    }
    if device != "cpu":
        facts |= devices.facts()
    return facts


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
