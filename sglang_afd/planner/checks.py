"""Checks of one number each, with errors that say what to do about it."""

from __future__ import annotations

import sys

from sglang_afd.errors import ConfigError


def printable(what: str, name: str) -> None:
    """Refuse a name that would move the cursor of a terminal, or break a line."""
    if not name.isprintable():
        raise ConfigError(f"{what}: its name {name!r:.80} has control characters; leave them out")


def positive(owner: str, name: str, value: float) -> None:
    """Refuse zero, negative numbers, infinities, NaN and integers beyond all floats."""
    if not _is_finite(value) or value <= 0:
        raise ConfigError(f"{owner}: {name} is {_short(value)}; it has to be a number above 0")


def not_negative(owner: str, name: str, value: float) -> None:
    """Refuse negative numbers, infinities, NaN and integers beyond all floats."""
    if not _is_finite(value) or value < 0:
        raise ConfigError(f"{owner}: {name} is {_short(value)}; it has to be a number of 0 or more")


def whole(owner: str, name: str, value: float) -> None:
    """Refuse a count that is not a whole number above 0."""
    positive(owner, name, value)
    if value != int(value):
        raise ConfigError(f"{owner}: {name} is {value}; it has to be a whole number")


def between(owner: str, name: str, value: float, low: float, high: float, hint: str) -> None:
    """Refuse what no machine can have: most often another unit than the name says."""
    positive(owner, name, value)
    if not low <= value <= high:
        raise ConfigError(
            f"{owner}: {name} is {value:g}, outside {low:g} to {high:g}; is it another unit? {hint}"
        )


def step_us(owner: str, value: float) -> None:
    """Refuse a measured step that is none of a served model."""
    hint = "Wanted: microseconds, a step of 30 ms is 30000."
    between(owner, "time_us", value, 200, 1e7, hint)


def _is_finite(value: float) -> bool:
    return abs(value) <= sys.float_info.max  # an integer of 400 digits has no float to ask


def _short(value: float) -> str:
    return str(value) if not value > sys.float_info.max else "beyond 1e308"
