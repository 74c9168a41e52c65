"""Decode steps of stock SGLang and of split roles on the same device, in turn, in one run.

Blocks alternate: stock SGLang alone on the device, then attention and MLP servers under a private
MPS daemon, and again. A block loads its model once and runs every case, batch x context: some steps
to warm up, timed ones with the device idle before and after, and one that counts which experts get
rows. The logits of both sides are compared before anything is timed, those of every attention
server, from the graphs that are timed. The stock side has none of our hooks, no SM share and no
MPS. Weights are made by seed and name, equal on both sides.

`--also` measures more deployments of split roles against the same blocks of stock SGLang, which
saves an import, compiled kernels and loading for each of them.

Prints one JSON line for each case of each deployment: `case`, `colocated_ms`, `afd_ms`, `ratio`,
and whether it is `valid`. Goes on when a case or a block fails; the exit code is then 1.

    python benchmark/bench_step.py --model qwen3-30b --out docs/results/bench_step_h200.jsonl
    python benchmark/bench_step.py --attn 2 --cases 128x1024 --also="--rounds off" --profile
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
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import provenance
from step import device as devices
from step import kernels, logits, models, plan
from step.arguments import model_of, parse, setup_of
from step.blocks import BlockResult, Runner
from step.cases import Case, Variant
from step.fleet import Launcher
from step.summary import BlockRun, line_of, median_step_ms

# Of the zygote and of both sides.
ENVIRONMENTS = {
    "cuda": {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"},
    "cpu": {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "5000"},  # as our launcher sets them
}
DISTRIBUTIONS = ("sglang", "torch", "triton", "sglang-kernel", "flashinfer-python", "sgl-deep-gemm")


def main(argv: Sequence[str]) -> int:
    """Measure; returns 1 when something failed or a result is not valid."""
    each = parse(argv, __doc__ or "")
    args = each[0]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    environment = ENVIRONMENTS[args.device]
    with Launcher(is_dummy=not args.model_path, environment=environment) as launcher:
        model_path = model_of(args, launcher.directory)
        variants = [
            Variant(setup=setup_of(one, model_path), cases=tuple(one.cases)) for one in each
        ]
        bench = Bench(args, variants, launcher)
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


@dataclass(kw_only=True)
class Side:
    """The blocks of one kind of deployment: of stock SGLang, or of a variant."""

    label: str
    blocks: list[BlockResult] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def runs(self, case: Case) -> list[BlockRun]:
        """Of the blocks in which it did not fail."""
        return [block.runs[case.name] for block in self.blocks if case.name in block.runs]

    def profile(self, case: Case) -> dict[str, Any] | None:
        """Of the one block that has one."""
        found = (block.profiles.get(case.name) for block in self.blocks)
        return next((profile for profile in found if profile), None)

    @property
    def block_s(self) -> float:
        """What one more block takes; the first one does more than others."""
        return min((float(block.facts["block_s"]) for block in self.blocks), default=0.0)


@dataclass(kw_only=True)
class Split(Side):
    """A variant's."""

    variant: Variant
    mps: str = ""
    logits: dict[str, Any] | None = None


class Bench:
    """Blocks in turn; keeps what was found so far, so that there is always something to show."""

    def __init__(
        self, args: argparse.Namespace, variants: Sequence[Variant], launcher: Launcher
    ) -> None:
        self._args = args
        self._variants = variants
        self._launcher = launcher
        self._runner = Runner(launcher, args.block_timeout)
        self._stock = Side(label="colocated")
        self._splits = [
            Split(label=variant.setup.label, variant=variant) for variant in self._variants
        ]
        self._started_s = time.monotonic()
        config = models.read_config(variants[0].setup.model_path)
        self._num_experts = int(config.get("num_experts") or config["n_routed_experts"])
        self._num_layers = int(config["num_hidden_layers"])

    @property
    def failures(self) -> list[str]:
        """Of all sides."""
        return [*self._stock.failures, *(text for split in self._splits for text in split.failures)]

    def run(self) -> None:
        """Every block, or as many as the time allows."""
        _say(plan.describe(self._variants, self._args.blocks))
        ready = self._launcher.wait_ready()
        self._note(f"SGLang imported in {ready['import_s']} s")
        if not ready["can_fork"]:
            self._note("importing SGLang initialised CUDA: every child imports it again")
        for number in range(self._args.blocks):
            if self._is_late():
                self._note(f"--time-limit: {number} of {self._args.blocks} blocks were run")
                break
            self._run_turn(number)

    def _run_turn(self, number: int) -> None:
        """A block of stock SGLang, then one of each variant."""
        is_first = number == 0
        self._keep(self._stock, self._runner.colocated(self._variants, is_first=is_first))
        for split in self._splits:
            with self._shared_gpu(split) as environment:
                result = self._runner.afd(split.variant, environment, is_first=is_first)
            self._keep(split, result)
            if is_first:
                self._compare_logits(split)
            cases = "; ".join(self._progress(split, case) for case in split.variant.cases)
            self._note(f"block {number + 1}, {split.label}: {cases}")
            if self._args.out:
                text = "".join(json.dumps(line) + "\n" for line in self.lines())
                _partial(self._args.out).write_text(text)

    def _is_late(self) -> bool:
        """Would one more turn, at the pace so far, end after the limit?"""
        turn_s = sum(side.block_s for side in (self._stock, *self._splits))
        if not self._args.time_limit or not self._stock.blocks:
            return False
        return time.monotonic() - self._started_s + 1.1 * turn_s > self._args.time_limit

    @contextlib.contextmanager
    def _shared_gpu(self, split: Split) -> Iterator[Mapping[str, str]]:
        setup = split.variant.setup
        if setup.device == "cpu" or not setup.with_mps:
            split.mps = "no"
            yield {}
            return
        from sglang_afd.fleet.mps import private_mps

        with private_mps() as mps:
            split.mps = "no: " + mps.reason if mps.environment is None else "private"
            if not mps.is_private:
                split.mps = "the user's own daemon, which the colocated side finds as well"
            yield mps.environment or {}
        for problem in mps.problems:
            self._note(problem)

    def _keep(self, side: Side, result: BlockResult) -> None:
        side.blocks.append(result)
        for failure in result.failures:
            side.failures.append(f"{side.label}: {failure.splitlines()[0]}")
            self._note(f"{side.label} failed: {failure}")
        self._note(f"{side.label}: {json.dumps(result.facts)}")

    def _compare_logits(self, split: Split) -> None:
        num_rows = split.variant.probe_rows
        saved, stock = split.blocks[0].logits, self._stock.blocks[0].logits
        if num_rows not in saved or num_rows not in stock:
            return
        split.logits = logits.compare_servers(
            {size: np.load(files[0]) for size, files in stock.items()},
            [np.load(file) for file in saved[num_rows]],
            num_rows,
            bound=self._args.logits_bound,
            rounds_as_stock=split.variant.rounds_as_stock,
        )
        self._note(f"logits, {split.label}: {json.dumps(split.logits)}")

    def _progress(self, split: Split, case: Case) -> str:
        medians = [
            median_step_ms(runs) if (runs := side.runs(case)) else float("nan")
            for side in (self._stock, split)
        ]
        return f"{case.name} {medians[0]:.3f} | {medians[1]:.3f} ms ({medians[1] / medians[0]:.3f})"

    def lines(self) -> list[dict[str, Any]]:
        """One for each case of each variant, with what failed where it did."""
        return [
            self._head(split) | self._line(split, case)
            for split in self._splits
            for case in split.variant.cases
        ]

    def _line(self, split: Split, case: Case) -> dict[str, Any]:
        runs = {"colocated": self._stock.runs(case), "afd": split.runs(case)}
        failures = [*self._stock.failures, *split.failures]
        if not all(runs.values()):
            return {"case": case.name, "valid": False, "invalid_because": failures}
        line = line_of(
            case,
            runs["colocated"],
            runs["afd"],
            num_experts=self._num_experts,
            logits=split.logits,
        )
        profiles = {"colocated": self._stock.profile(case), "afd": split.profile(case)}
        if any(profiles.values()):
            line["profile"] = profiles
            line["difference_ms"] = _difference(profiles)
            line["experts_ms"] = _experts_ms(profiles)
        return line | {
            "blocks": {side: len(blocks) for side, blocks in runs.items()},
            "facts": {
                side: [result.facts for result in results]
                for side, results in (("colocated", self._stock.blocks), ("afd", split.blocks))
            },
            "failures": failures,
        }

    def _head(self, split: Split) -> dict[str, Any]:
        setup = split.variant.setup
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
            "dispatch_dtype": setup.dispatch_dtype,
            "attention_backend": setup.attention_backend,
            "moe_runner_backend": setup.moe_runner_backend or "auto",
            "sm_share": setup.sm_share or "none",
            "mps": {"afd": split.mps, "colocated": "no"},
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


def _experts_ms(profiles: Mapping[str, Any]) -> dict[str, Any]:
    """The experts' kernels in one step of every server, and how many runs of a layer that was."""
    stock, split = profiles["colocated"] or {}, profiles["afd"] or {}
    ranks = [seen for name, seen in split.items() if name.startswith("mlp")]
    return {
        "colocated": stock["colocated"]["ms"]["moe"] if stock else None,
        "afd": [kernels.experts_ms(rank["ms"]) for rank in ranks],
        "runs_per_step": [round(rank["units"], 2) for rank in ranks],
    }


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
