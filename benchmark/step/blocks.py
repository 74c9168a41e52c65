"""Runs one block: its children, every case, and what was seen of each."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_afd.ports import free_ports
from step import device, kernels, roles
from step.cases import FIRST_BLOCK_S, Case, Setup, Variant, cases_of, probe_sizes
from step.fleet import Block, BlockFailed, Child, ChildSpec, Launcher
from step.summary import BlockRun, PeerRun

SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
SETTLE_S = 0.1  # a rank counts a unit once its replies are on their way
_COUNTED = (
    *("decode_runs", "decode_run_peers", "decode_rows", "rounds", "windows", "lone_runs"),
    *("expert_run_seconds", "wait_seconds", "launches", "graph_runs", "launch_seconds"),
)
_METRIC = "sglang_afd_mlp_{}_total"


@dataclass(kw_only=True)
class BlockResult:
    """What one block found; a case that failed is missing in `runs`."""

    runs: dict[str, BlockRun] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    logits: dict[int, list[Path]] = field(default_factory=dict)  # by batch, of each server
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is done in one block."""

    setup: Setup
    cases: Sequence[Case]
    probes: Sequence[int]  # batches whose logits are saved; none but in the first block
    profiles: bool  # once everything is timed
    timeout_s: float


class Runner:
    """Runs blocks of both sides."""

    def __init__(self, launcher: Launcher, timeout_s: float) -> None:
        self._launcher = launcher
        self._timeout_s = timeout_s
        self._free_bytes = 0  # of the device before the first block

    def colocated(self, variants: Sequence[Variant], *, is_first: bool) -> BlockResult:
        """Stock SGLang, alone on the device, with the cases of all variants.

        Args:
            variants: What it is compared with.
            is_first: Are logits saved, and kernels recorded where that is asked for?
        """
        argv = roles.colocated(variants, free_ports(1)[0])
        spec = ChildSpec(name="colocated", kind="colocated", argv=argv)
        plan = self._plan(
            variants[0].setup, cases_of(variants), probe_sizes(variants), is_first=is_first
        )
        return self._block(plan, [spec], "loaded")

    def afd(
        self, variant: Variant, environment: Mapping[str, str], *, is_first: bool
    ) -> BlockResult:
        """Both roles.

        Args:
            variant: Which deployment of them.
            environment: What they need to share a GPU.
            is_first: As of the colocated side.
        """
        specs = self._afd_specs(variant, environment)
        plan = self._plan(variant.setup, variant.cases, [variant.probe_rows], is_first=is_first)
        return self._block(plan, specs, "attached")

    def _plan(
        self, setup: Setup, cases: Sequence[Case], probes: Sequence[int], *, is_first: bool
    ) -> _Plan:
        return _Plan(
            setup=setup,
            cases=cases,
            probes=probes if is_first else [],
            profiles=is_first and setup.profile_steps > 0,
            timeout_s=self._timeout_s + (FIRST_BLOCK_S if is_first else 0.0),
        )

    def _afd_specs(self, variant: Variant, environment: Mapping[str, str]) -> list[ChildSpec]:
        setup = variant.setup
        ports = free_ports(setup.num_mlp + setup.num_attn)
        leader = f"http://127.0.0.1:{ports[0]}"
        shares = setup.sm_share.split(",") if setup.sm_share else ["", ""]
        env_attn = dict(environment) | ({SHARE_VARIABLE: shares[0]} if shares[0] else {})
        env_mlp = dict(environment) | ({SHARE_VARIABLE: shares[1]} if shares[1] else {})
        env_mlp["SGLANG_AFD_ROUNDS"] = setup.rounds
        mlp = [
            ChildSpec(
                name=f"mlp-{rank}",
                kind="mlp",
                argv=roles.mlp(
                    variant,
                    port,
                    rank=rank,
                    leader_url=leader,
                    listen=f"ipc://{self._launcher.directory}/{port}.sock",
                ),
                env=env_mlp,
            )
            for rank, port in enumerate(ports[: setup.num_mlp])
        ]
        attn = [
            ChildSpec(
                name=f"attn-{index}",
                kind="attn",
                argv=roles.attention(variant, port, leader),
                env=env_attn,
            )
            for index, port in enumerate(ports[setup.num_mlp :])
        ]
        return [*mlp, *attn]

    def _block(self, plan: _Plan, specs: list[ChildSpec], ready: str) -> BlockResult:
        result = BlockResult()
        started_s = time.monotonic()
        result.facts = self._clean_device(plan, result)
        try:
            with self._launcher.block(specs, timeout_s=plan.timeout_s) as block:
                decoders = block.of_kind("colocated", "attn")
                block.wait_said(ready, "colocated", "attn")
                result.facts |= _facts(block, time.monotonic() - started_s)
                for num_rows in plan.probes:
                    result.logits[num_rows] = self._probe(block, decoders, num_rows)
                for case in plan.cases:
                    with _named(case.name):
                        result.runs[case.name] = _run_case(plan.setup, block, decoders, case)
                if plan.profiles:
                    _profile_cases(plan, block, decoders, result)
                block.ask_all(decoders, {"do": "end"})
        except BlockFailed as error:
            result.failures.append(str(error))
        result.facts["block_s"] = round(time.monotonic() - started_s, 1)
        return result

    def _clean_device(self, plan: _Plan, result: BlockResult) -> dict[str, Any]:
        """Wait until what the block before had is free; says what is free then."""
        if plan.setup.device == "cpu":
            return {}
        free = device.wait_until_free(self._free_bytes)
        if free is None:
            return {"free_gib_at_start": None}
        self._free_bytes = self._free_bytes or free
        if free < self._free_bytes - device.SLACK_BYTES:
            kept = (self._free_bytes - free) / 2**30
            result.failures.append(f"{kept:.1f} GiB of the device are in use before the block")
        return {"free_gib_at_start": round(free / 2**30, 2)}

    def _probe(self, block: Block, decoders: list[Child], num_rows: int) -> list[Path]:
        """All at the same time, so that their rows meet in rounds as they do when it is timed."""
        names = [f"logits-{child.spec.name}-{num_rows}.npy" for child in decoders]
        files = [self._launcher.directory / name for name in names]
        orders = [
            {
                "do": "probe",
                "file": str(file),
                "num_rows": num_rows,
                "first": index * num_rows // len(files),
            }
            for index, file in enumerate(files)
        ]
        with _named(f"logits of {num_rows} rows"):
            block.ask_all(decoders, *orders)
        return files


def _run_case(setup: Setup, block: Block, decoders: list[Child], case: Case) -> BlockRun:
    _prepare(setup, block, decoders, case)
    before = _counts(block)
    order = {"do": "decode", "warm": setup.warm_steps, "steps": setup.steps}
    answers = block.ask_all(decoders, order)
    counts = _per_step(before, _counts(block), setup.warm_steps + 2 * setup.steps + 1)
    touched = block.ask_all(decoders, {"do": "touched"})
    return BlockRun(
        peers=[
            PeerRun(
                step_ms=answer["step_ms"],
                device_ms=answer["device_ms"],
                stream_ms=answer["stream_ms"],
                touched=seen["touched"],
            )
            for answer, seen in zip(answers, touched, strict=True)
        ],
        mlp=counts,
    )


def _prepare(setup: Setup, block: Block, decoders: list[Child], case: Case) -> None:
    rows = case.batch // len(decoders)
    orders = [
        {
            "do": "prepare",
            "first_row": index * rows,
            "num_rows": rows,
            "context": case.context,
            "is_cached": setup.context_kind == "cached",
        }
        for index in range(len(decoders))
    ]
    block.ask_all(decoders, *orders)


def _profile_cases(plan: _Plan, block: Block, decoders: list[Child], result: BlockResult) -> None:
    """All record before anyone decodes: a profiler takes longer to begin than a step."""
    steps = plan.setup.profile_steps
    everyone = [*decoders, *block.of_kind("mlp")]
    began_s = time.monotonic()
    for case in plan.cases:
        with _named(f"profile of {case.name}"):
            _prepare(plan.setup, block, decoders, case)
            block.ask_all(everyone, {"do": "record"})
            block.ask_all(decoders, {"do": "profile", "steps": steps})
            seen = block.ask_all(everyone, {"do": "recorded"})
            result.profiles[case.name] = {
                child.spec.name: {
                    "ms": kernels.times_of(answer["kernels"], steps),
                    "slowest": kernels.slowest(answer["kernels"], steps),
                    "units": kernels.units(answer["kernels"]) / steps,
                }
                for child, answer in zip(everyone, seen, strict=True)
            }
    result.facts["profile_s"] = round(time.monotonic() - began_s, 1)


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except BlockFailed as error:
        raise BlockFailed(f"{what}: {error}") from None


def _facts(block: Block, ready_s: float) -> dict[str, Any]:
    facts: dict[str, Any] = {"ready_s": round(ready_s, 1)}
    facts["children"] = {
        child.spec.name: {
            key: value for key, value in child.said.get("loaded", {}).items() if key != "is"
        }
        for child in block.of_kind("colocated", "attn")
    }
    return facts


def _counts(block: Block) -> dict[str, float]:
    """Of the counters of rank 0, which forms the rounds; empty without MLP servers."""
    ranks = block.of_kind("mlp")
    if not ranks:
        return {}
    time.sleep(SETTLE_S)
    argv = ranks[0].spec.argv
    url = f"http://127.0.0.1:{argv[argv.index('--port') + 1]}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError as error:
        raise BlockFailed(f"{url}: {error}") from None
    values = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        with contextlib.suppress(ValueError):
            values[name.partition("{")[0]] = float(value)
    return {name: values.get(_METRIC.format(name), 0.0) for name in _COUNTED}


def _per_step(before: dict[str, float], after: dict[str, float], steps: int) -> dict[str, float]:
    changes = {name: after[name] - before[name] for name in after}
    if not changes:
        return {}
    runs = changes["decode_runs"]
    return {f"{name}_per_step": change / steps for name, change in changes.items()} | {
        "peers_per_decode_run": changes["decode_run_peers"] / runs if runs else 0.0
    }
