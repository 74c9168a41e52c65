"""Reads public measurements: descriptions apart from measured values, so that neither leaks.

The schema is that of the FastAFD collection: `models`, `hardware`, `records`. A record that has a
context and a measured step is a row; the others (capacities, kernel tables) are not predicted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks
from sglang_afd.planner.description import Row, describe
from sglang_afd.planner.fit import ROW_NOISE, Observation
from sglang_afd.planner.json_file import read_json
from sglang_afd.planner.record_fields import number, optional, text

# The clock of a system: CUDA spans for colocated rows, the coordinator's for AFD rows.
_STEP_FIELDS = ("step_ms_cuda", "step_ms")
_RATE_FIELDS = ("tok_s_gpu_cuda", "tok_s_gpu")

# Rows that their source doubts, such as outliers or steps that the hosts bound, count less in a
# fit; they are predicted and compared as all others are. A third and a sixth are a choice.
_NOISE_FACTORS = {"medium": 3.0, "low": 6.0}


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """A row with its result; the predictor never sees one."""

    row: Row
    step_us: float
    noise: float = ROW_NOISE  # standard deviation of the logarithm

    @property
    def observation(self) -> Observation:
        """What a fit reads."""
        return Observation(
            scenario=self.row.scenario,
            deployment=self.row.deployment,
            time_us=self.step_us,
            noise=self.noise,
        )


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """A row whose result cannot be used, and why: it can be predicted, but not compared."""

    row: Row
    reason: str


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A record with a step that is not predicted, and why."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Collection:
    """All rows of a file, in its order."""

    rows: tuple[MeasuredRow, ...]
    unmeasured: tuple[Unmeasured, ...]
    skipped: tuple[Skipped, ...]


def read_collection(path: Path, strict: bool = True) -> Collection:
    """All rows of a file of the schema.

    Args:
        path: Of the JSON file.
        strict: Raise at a record without a description or a result; otherwise list it.
    Raises: ConfigError, naming the record and the field.
    """
    data = _read(path)
    found = [
        _read_record(record, data["models"], data["hardware"], strict) for record in data["records"]
    ]
    collection = Collection(
        rows=tuple(item for item in found if isinstance(item, MeasuredRow)),
        unmeasured=tuple(item for item in found if isinstance(item, Unmeasured)),
        skipped=tuple(item for item in found if isinstance(item, Skipped)),
    )
    if not collection.rows:
        left_out = [item for item in found if isinstance(item, Unmeasured | Skipped)]
        about = [
            f"; of {len(left_out)} unusable ones the first: {item.reason}" for item in left_out[:1]
        ]
        raise ConfigError(f"{path}: no record has a context and a measured step{''.join(about)}")
    return collection


def _read(path: Path) -> dict[str, Any]:
    """The three parts of the file, each of the right type."""
    data = read_json(path, "JSON")
    if not isinstance(data, dict) or not isinstance(data.get("records"), list):
        raise ConfigError(f"{path}: wanted an object with a list `records`")
    parts = {"records": data["records"]}
    for key in ("models", "hardware"):
        parts[key] = {} if data.get(key) is None else data[key]
        if not isinstance(parts[key], dict):
            raise ConfigError(f"{path}: `{key}` is no object; wanted one entry a name")
    return parts


def _read_record(
    record: Any, models: Mapping[str, Any], hardware: Mapping[str, Any], strict: bool
) -> MeasuredRow | Unmeasured | Skipped | None:
    """None for records that are no steps.

    The description comes first, so that no result decides whether a row is predicted.
    """
    if isinstance(record, Mapping) and "context" not in record:
        return None
    try:
        if not isinstance(record, Mapping):
            raise ConfigError(f"a record is {record!r:.40}, wanted an object")
        verdict = text(record, "plausibility", "ok")
        if verdict not in ("ok", "true", ""):
            return Skipped(id=str(record.get("id")), reason=f"marked at its source: {verdict}")
        row = describe(record, models, hardware)
    except ConfigError as error:
        if strict:
            raise
        name = record.get("id") if isinstance(record, Mapping) else None
        return Skipped(id=str(name), reason=str(error))
    try:
        return MeasuredRow(row=row, step_us=measured_step_us(record), noise=_noise(record))
    except ConfigError as error:
        if strict:
            raise
        return Unmeasured(row=row, reason=str(error))


def measured_step_us(record: Mapping[str, Any]) -> float:
    """The result of a record.

    Raises: ConfigError, when it has none, or when step time and rate contradict each other, as they
    do in other units.
    """
    owner = f"record {record.get('id')}"
    step_us, from_rate_us = _step_us(record), _step_us_from_rate(record)
    if step_us is not None:
        checks.step_us(owner, step_us)
    if from_rate_us is not None:
        checks.step_us(owner, from_rate_us)
    if step_us is None or from_rate_us is None:
        result = step_us or from_rate_us
        if result is None:
            raise ConfigError(f"{owner}: no step and no rate on the clock of its system")
        return result
    if not 0.5 < step_us / from_rate_us < 2:
        raise ConfigError(
            f"{owner}: a step of {step_us / 1000:g} ms, and its tokens/s per GPU are those of a "
            f"step of {from_rate_us / 1000:g} ms; is one of them in another unit?"
        )
    return step_us


def _noise(record: Mapping[str, Any]) -> float:
    """By the first word of `confidence`, as in `medium (outlier)`."""
    words = text(record, "confidence", "").split()
    return ROW_NOISE * _NOISE_FACTORS.get(words[0] if words else "", 1.0)


def _step_us(record: Mapping[str, Any]) -> float | None:
    is_there = any(record.get(key) is not None for key in _STEP_FIELDS)
    return number(record, *_STEP_FIELDS) * 1000 if is_there else None


def _step_us_from_rate(record: Mapping[str, Any]) -> float | None:
    if all(record.get(key) is None for key in _RATE_FIELDS):
        return None
    rate = number(record, *_RATE_FIELDS)
    checks.positive(f"record {record.get('id')}", "tokens/s per GPU", rate)
    share = 1.0
    if record.get("attn_gpus") is not None:
        attn_gpus = number(record, "attn_gpus")
        both = attn_gpus + number(record, "ffn_gpus")
        total_gpus = optional(record, "total_gpus", both)
        checks.positive(f"record {record.get('id')}", "total_gpus", total_gpus)
        share = attn_gpus / total_gpus
    batch = number(record, "batch_per_attn_gpu", "batch_per_gpu")
    return batch * share * optional(record, "accepted_tokens", 1) / rate * 1e6
