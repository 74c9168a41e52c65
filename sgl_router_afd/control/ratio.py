"""How many attention servers a group wants: `--ratio 7:1`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from sgl_router_afd.control.places import natural
from sglang_afd.errors import ConfigError

MAX_NUMBER = 4096  # on each side of a ratio


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
    # Python reads no number of thousands of digits.
    is_short = max(len(left), len(right)) <= 100
    if not (is_short and 1 <= int(left) <= MAX_NUMBER and 1 <= int(right) <= MAX_NUMBER):
        raise ConfigError(f"--ratio got {text[:100]!r}; both numbers go from 1 to {MAX_NUMBER}")
    return Ratio(num_attn=int(left), num_mlp=int(right))


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a group has now, to choose among groups."""

    name: str
    num_attn: int
    num_mlp: int
    is_whole: bool  # every expert has an MLP server, which may load it yet


class Choice:
    """Which group a new attention server joins, one server after the other.

    With a ratio the fullest group below its target is completed first, since a group gains from
    every attention server up to it; without one, and above it, groups are kept even.

    Args:
        sizes: Of all groups that it may join.
        ratio: Attention to MLP servers, or None.
    """

    def __init__(self, sizes: Iterable[Size], ratio: Ratio | None) -> None:
        self._ratio = ratio
        self._sizes = {size.name: size for size in sizes}
        # The best is first. What was true of a group before stays in it until it comes up.
        self._heap = [self._standing(size) for size in self._sizes.values()]
        heapify(self._heap)

    def best(self) -> str:
        """The group that the next one joins; "" without any."""
        while self._heap:
            first = self._heap[0]
            name = first[2][1]
            if first == self._standing(self._sizes[name]):
                return name
            heappop(self._heap)
        return ""

    def count(self, name: str) -> None:
        """An attention server has joined this group, chosen or not."""
        size = self._sizes.get(name)
        if size is not None:
            self._sizes[name] = grown = replace(size, num_attn=size.num_attn + 1)
            heappush(self._heap, self._standing(grown))

    def _standing(self, size: Size) -> tuple[int, float, tuple[int, str]]:
        """Smaller is better."""
        missing = self._ratio.target(size.num_mlp) - size.num_attn if self._ratio else 0
        kind = (0 if missing > 0 else 1) + (0 if size.is_whole else 2)
        share = size.num_attn / max(1, size.num_mlp)
        return (kind, missing if missing > 0 else share, natural(size.name))
