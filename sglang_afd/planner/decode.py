"""Turns parsed JSON into the planner's dataclasses, with errors that name the field."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from sglang_afd.errors import ConfigError


def decode(wanted: Any, value: Any, where: str) -> Any:
    """Build `wanted` (a dataclass, enum, tuple, dict, optional or plain type) from parsed JSON.

    Args:
        wanted: The type, as in an annotation.
        value: What json.loads gave.
        where: Path to the value, for messages.
    Raises: ConfigError.
    """
    if dataclasses.is_dataclass(wanted):
        return _dataclass(wanted, value, where)
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin is types.UnionType:
        rest = [kind for kind in arguments if kind is not type(None)]
        return None if value is None else decode(rest[0], value, where)
    if origin is tuple:
        _require(isinstance(value, list), where, value, "a list")
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _require(isinstance(value, dict), where, value, "an object")
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        names = [member.value for member in wanted]
        _require(value in names, where, value, f"one of {', '.join(map(str, names))}")
        return wanted(value)
    return _scalar(wanted, value, where)


def _dataclass(wanted: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, Mapping), where, value, "an object")
    fields = {field.name: field for field in dataclasses.fields(wanted)}
    if unknown := sorted(set(value) - set(fields)):
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(fields)}")
    missing = [
        name
        for name, field in fields.items()
        if name not in value
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: has no {' and no '.join(missing)}")
    hints = get_type_hints(wanted)
    return wanted(
        **{name: decode(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    )


def _scalar(wanted: Any, value: Any, where: str) -> Any:
    if wanted is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(number, where, value, "a number")
        _require(not abs(value) > sys.float_info.max, where, value, "a number below 1e308")
        return float(value)
    strict = type(value) is wanted
    _require(strict, where, value, {int: "a whole number", str: "a text"}.get(wanted, str(wanted)))
    return value


def _require(holds: bool, where: str, value: Any, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{where}: is {value!r}, wanted {wanted}")
