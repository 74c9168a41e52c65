"""Kernel times from the measured tables of aiconfigurator-core, which is optional.

Its tables are files of one measured kernel time a row; two of them are read here: core attention in
decode, and the experts of one rank. A row has to be plausible against the roofline to be used.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_afd.planner.deployment import Deployment, Mode, Workload
from sglang_afd.planner.fit import Observation
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.routing import skewed_routing
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.shape import ModelShape

PACKAGE = "aiconfigurator_core"
SYSTEMS = {
    "GB200": "gb200",
    "GB300": "gb300",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "H200": "h200_sxm",
    "H100": "h100_sxm",
}
# A time below the roofline cannot be; the clock and the stated peak may be this far apart.
FASTEST = 0.9
# Nor is one this far above it that of a kernel that anybody serves with. Starts of kernels come on
# top: version 0.12 has GEMM times of 20 times the roofline in one backend's table.
SLOWEST = 8.0
START_US = 60.0
# Source: the tables against FastAFD's own split of a colocated step: core 1 %, experts 11 % off.
NOISE = {"core": 0.1, "experts": 0.15}
# Rows of one table share their error, so that all together count as so many independent ones.
INDEPENDENT_ROWS = 4

# Exponents of expert popularity (Zipf): no model routes less evenly, or more evenly.
UNEVEN, EVEN = 1.2, 0.0

_BATCHES = (8, 32, 64, 128, 256)
_CONTEXTS = (1024, 4096, 8192, 32768)
_RANKS = (1, 2, 4, 8, 16)
_TOKENS_OF_A_RANK = (4, 16, 64, 256)
# How unevenly the table's tokens chose experts: the mildest of its skewed distributions.
_DISTRIBUTION = "power_law_1.01"


class NoTables(Exception):
    """Why there is nothing to read."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One row of a table."""

    stage: str  # core or experts
    deployment: Deployment
    context_tokens: float
    time_us: float


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What passed the gate."""

    version: str
    observations: tuple[Observation, ...]
    notes: tuple[str, ...]


def read_tables(shape: ModelShape, gpu: Gpu) -> Tables:
    """Times of this model's kernels on this GPU.

    Raises: NoTables.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise NoTables("it is not installed; pip install aiconfigurator-core")
    if gpu.name not in SYSTEMS:
        raise NoTables(f"it has no tables of {gpu.name} ({', '.join(SYSTEMS)} it has)")
    folder = Path(spec.submodule_search_locations[0]) / "systems/data" / SYSTEMS[gpu.name]
    rows = [
        *_core_rows(shape, _table(folder, "attention", "generation_attention_perf")),
        *_expert_rows(shape, _table(folder, "moe", "moe_perf")),
    ]
    version = f"aiconfigurator-core {importlib.metadata.version('aiconfigurator-core')}"
    return gated(version, rows, shape, gpu)


def gated(version: str, rows: Iterable[Timed], shape: ModelShape, gpu: Gpu) -> Tables:
    """The rows that are plausible, as observations; the others are counted in a note.

    Raises: NoTables, when a table has nothing plausible for the model.
    """
    given = list(rows)
    kept = [row for row in given if is_plausible(row, shape, gpu)]
    if not kept:
        raise NoTables(
            f"it has no plausible times for the sizes of {shape.name} on {gpu.name} "
            f"({len(given)} rows, none within {FASTEST:g} to {SLOWEST:g} times the roofline)"
        )
    notes = []
    if len(kept) < len(given):
        notes.append(
            f"{len(given) - len(kept)} of {len(given)} table rows are implausible (outside "
            f"{FASTEST:g} to {SLOWEST:g} times the roofline) and are not used"
        )
    for stage in NOISE:
        if not any(row.stage == stage for row in kept):
            notes.append(f"the tables have no {stage} of these sizes; the prior stands in")
    notes.append("the dense rest, the exchange and the start of a step are priors")
    counts = {stage: sum(row.stage == stage for row in kept) for stage in NOISE}
    return Tables(
        version=version,
        observations=tuple(_observation(row, shape, gpu, counts[row.stage]) for row in kept),
        notes=tuple(notes),
    )


def is_plausible(row: Timed, shape: ModelShape, gpu: Gpu) -> bool:
    """Neither faster than the hardware nor far slower than a kernel may be.

    Uneven routing hits fewer experts: the lower limit counts on much of that, the upper on none.
    """
    least, most = (roofline_us(row, shape, gpu, skew) for skew in (UNEVEN, EVEN))
    return FASTEST * least <= row.time_us <= SLOWEST * most + START_US


def roofline_us(row: Timed, shape: ModelShape, gpu: Gpu, skew: float) -> float:
    """What peak bandwidth and peak arithmetic allow at best."""
    deployment = row.deployment
    if row.stage == "core":
        cached = deployment.batch_per_attn_gpu * row.context_tokens
        read_us = cached * shape.kv_bytes_per_token_layer / gpu.hbm_bytes_per_us
        flops = cached * shape.core_flops_per_cached_token
        return max(read_us, flops / gpu.bf16_flops_per_us)
    ranks = deployment.expert_parallel
    tokens = deployment.batch_per_attn_gpu * ranks
    routing = skewed_routing(shape.num_experts, shape.experts_per_token, skew)
    hit = routing.distinct_experts(tokens) / ranks
    read_us = hit * shape.expert_bytes / gpu.hbm_bytes_per_us
    computed = tokens * shape.experts_per_token / ranks * shape.expert_flops_per_token
    return max(read_us, computed / gpu.flops_per_us(shape.weight_bytes))


def _observation(row: Timed, shape: ModelShape, gpu: Gpu, count: int) -> Observation:
    workload = Workload(context_tokens=row.context_tokens)
    return Observation(
        scenario=Scenario(shape=shape, gpu=gpu, workload=workload),
        deployment=row.deployment,
        time_us=row.time_us,
        stage=row.stage,
        noise=NOISE[row.stage] * math.sqrt(max(count / INDEPENDENT_ROWS, 1)),
    )


def _core_rows(shape: ModelShape, table: Callable[[Any], Mapping[str, list[Any]]]) -> list[Timed]:
    """Rows of the same cache and arithmetic, whatever the size of a head."""
    kv_dtype = "fp8" if shape.kv_element_bytes <= 1 else "bfloat16"
    columns = table(
        [
            ("kv_cache_dtype", "==", kv_dtype),
            ("window_size", "==", 0),
            ("batch_size", "in", _BATCHES),
            ("step", "in", [context - 1 for context in _CONTEXTS]),
        ]
    )
    rows: dict[tuple[int, int], float] = {}
    for batch, step, heads, kv_heads, head_dim, latency in _zipped(
        columns, "batch_size", "step", "num_heads", "num_key_value_heads", "head_dim", "latency"
    ):
        is_same = (
            2 * kv_heads * head_dim == shape.kv_elements_per_token
            and 4 * heads * head_dim == shape.core_flops_per_cached_token
        )
        if is_same:
            time_us = min(latency * 1000, rows.get((batch, step), math.inf))
            rows[batch, step] = time_us
    return [
        Timed(
            stage="core",
            deployment=_colocated(1, batch),
            context_tokens=step + 1,
            time_us=time_us,
        )
        for (batch, step), time_us in sorted(rows.items())
    ]


def _expert_rows(shape: ModelShape, table: Callable[[Any], Mapping[str, list[Any]]]) -> list[Timed]:
    """Rows of one rank of the same experts; of several kernels the fastest."""
    dtype = {0.5: "nvfp4", 1.0: "fp8_block", 2.0: "bfloat16"}.get(shape.weight_bytes, "")
    columns = table(
        [
            ("moe_dtype", "==", dtype),
            ("hidden_size", "==", shape.hidden_size),
            ("inter_size", "==", shape.moe_intermediate_size),
            ("num_experts", "==", shape.num_experts),
            ("topk", "==", shape.experts_per_token),
            ("moe_tp_size", "==", 1),
            ("distribution", "==", _DISTRIBUTION),
        ]
    )
    wanted = {(ranks, ranks * tokens) for ranks in _RANKS for tokens in _TOKENS_OF_A_RANK}
    rows: dict[tuple[int, int], float] = {}
    for ranks, tokens, latency in _zipped(columns, "moe_ep_size", "num_tokens", "latency"):
        if (ranks, tokens) in wanted:
            rows[ranks, tokens] = min(latency * 1000, rows.get((ranks, tokens), math.inf))
    return [
        Timed(
            stage="experts",
            deployment=_colocated(ranks, tokens // ranks),
            context_tokens=1024,
            time_us=time_us,
        )
        for (ranks, tokens), time_us in sorted(rows.items())
    ]


def _colocated(ranks: int, batch: int) -> Deployment:
    return Deployment(
        mode=Mode.COLOCATED, attn_gpus=ranks, expert_parallel=ranks, batch_per_attn_gpu=batch
    )


def _zipped(columns: Mapping[str, list[Any]], *names: str) -> Iterable[tuple[Any, ...]]:
    return zip(*(columns[name] for name in names), strict=True)


def _table(folder: Path, family: str, name: str) -> Callable[[Any], Mapping[str, list[Any]]]:
    """A reader of the newest table that was measured with SGLang."""
    files = sorted(folder.glob(f"{family}/sglang/*/{name}.parquet"), key=_version)
    if not files:
        raise NoTables(f"its tables have no {family} at {folder}; is it another version than 0.12?")
    parquet = importlib.import_module("pyarrow.parquet")

    def read(filters: Any) -> Mapping[str, list[Any]]:
        columns: Mapping[str, list[Any]] = parquet.read_table(
            files[-1], filters=filters
        ).to_pydict()
        return columns

    return read


def _version(path: Path) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", path.parent.name)]
