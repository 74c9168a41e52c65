"""Reads numbers from a record of a collection, with errors that name record and field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang_afd.errors import ConfigError


def number(record: Mapping[str, Any], *keys: str) -> float:
    """The first of these fields that is there.

    Raises: ConfigError, when none is, or when it is no finite number.
    """
    for key in keys:
        value = record.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) < 1e300 or math.isnan(value):
            raise ConfigError(f"{_owner(record)}{key} is {value!r}, wanted a number")
        return float(value)
    raise ConfigError(f"{_owner(record)}has no {' or '.join(keys)}")


def whole(record: Mapping[str, Any], *keys: str) -> int:
    """Like `number`, for a count.

    Raises: ConfigError.
    """
    value = number(record, *keys)
    if value != int(value):
        raise ConfigError(f"{_owner(record)}{' or '.join(keys)} is {value}, wanted a whole number")
    return int(value)


def optional(record: Mapping[str, Any], key: str, default: float) -> float:
    """Like `number`, where the field may be missing."""
    return float(default) if record.get(key) is None else number(record, key)


def optional_whole(record: Mapping[str, Any], key: str, default: int) -> int:
    """Like `whole`, where the field may be missing."""
    return default if record.get(key) is None else whole(record, key)


def text(record: Mapping[str, Any], key: str, default: str) -> str:
    """A word in lower case, where the field may be missing."""
    value = record.get(key)
    return default if value is None else str(value).lower()


def _owner(record: Mapping[str, Any]) -> str:
    return f"record {record['id']}: " if "id" in record else ""
