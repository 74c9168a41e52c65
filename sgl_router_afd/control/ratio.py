"""How many attention servers a group wants: `--ratio 7:1`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_afd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Attention servers for each so many MLP servers."""

    num_attn: int
    num_mlp: int

    def target(self, num_mlp: int) -> int:
        """Attention servers of a group with `num_mlp` MLP servers, at least one."""
        return max(1, math.ceil(num_mlp * self.num_attn / self.num_mlp))


def parse_ratio(text: str) -> Ratio | None:
    """Read `7:1`; an empty text means no ratio.

    Raises:
        ConfigError: Not two whole numbers from 1 on.
    """
    if not text:
        return None
    left, _, right = text.partition(":")
    if not (left.isascii() and left.isdigit() and right.isascii() and right.isdigit()):
        raise ConfigError(f"--ratio got {text!r}; wanted attention to MLP servers, e.g. 7:1")
    if not (1 <= int(left) <= 4096 and 1 <= int(right) <= 4096):
        raise ConfigError(f"--ratio got {text!r}; both numbers go from 1 to 4096")
    return Ratio(num_attn=int(left), num_mlp=int(right))


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a group has now, to choose among groups."""

    name: str
    num_attn: int
    num_mlp: int
    is_covered: bool  # every expert has an MLP server


def choose_group(sizes: Iterable[Size], ratio: Ratio | None) -> str:
    """Which group a new attention server joins.

    With a ratio the fullest group below its target is completed first, since a group gains from
    every attention server up to it; without one, and above it, groups are kept even.
    """
    covered_first = sorted(sizes, key=lambda size: (not size.is_covered, size.name))
    if not covered_first:
        return ""
    candidates = [size for size in covered_first if size.is_covered] or covered_first
    if ratio is not None:
        short = {
            size.name: ratio.target(size.num_mlp) - size.num_attn
            for size in candidates
            if size.num_attn < ratio.target(size.num_mlp)
        }
        if short:
            return min(short, key=lambda name: short[name])
    return min(candidates, key=lambda size: size.num_attn / max(1, size.num_mlp)).name
