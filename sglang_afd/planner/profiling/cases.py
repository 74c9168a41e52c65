"""Which steps are measured, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_afd.errors import ConfigError

# Small ones first: a case warms up the next.
GPU_CASES = "8x1024,32x1024,64x1024,128x1024,256x1024,128x2048,64x4096,16x8192"
CPU_CASES = "1x64,4x64,16x64,4x256,16x256"

_MARGIN_TOKENS = 16  # of each sequence, beyond its context and the steps


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch at one context."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.batch}x{self.context}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides what is run."""

    cases: tuple[Case, ...]
    blocks: int  # turns through all cases
    steps: int  # timed ones of a case in a block, launched one after the other
    warm_steps: int

    def __post_init__(self) -> None:
        for name, least in (("blocks", 2), ("steps", 3), ("warm_steps", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"profile: {getattr(self, name)} {name.replace('_', ' ')} are too few samples; "
                    f"wanted {least} or more"
                )
        _check_grid(self.cases)

    @property
    def steps_of_case(self) -> int:
        """How far a sequence grows in a block at most."""
        return self.warm_steps + 3 * self.steps + _MARGIN_TOKENS

    @property
    def pool_tokens(self) -> int:
        """That the cache has to hold."""
        return max(case.batch * (case.context + self.steps_of_case) for case in self.cases)

    @property
    def widest(self) -> Case:
        """The case with the most sequences, and of those the shortest."""
        return max(self.cases, key=lambda case: (case.batch, -case.context))

    @property
    def batches(self) -> tuple[int, ...]:
        """Of all cases, in order."""
        return tuple(sorted({case.batch for case in self.cases}))


def parse_cases(text: str) -> tuple[Case, ...]:
    """From `64x1024,128x2048`.

    Raises: ConfigError.
    """
    cases = tuple(_parse_case(item.strip()) for item in text.split(","))
    if len(set(cases)) != len(cases):
        raise ConfigError(f"--cases {text}: a case is there twice")
    return cases


def _parse_case(text: str) -> Case:
    batch, _, context = text.partition("x")
    if not (batch.isdecimal() and context.isdecimal() and int(batch) and int(context)):
        raise ConfigError(f"--cases: {text!r} is no case; write batch x context, e.g. 64x1024")
    return Case(batch=int(batch), context=int(context))


def _check_grid(cases: Sequence[Case]) -> None:
    batches = {case.batch for case in cases}
    contexts = {case.context for case in cases}
    if len(batches) < 2 or len(contexts) < 2:
        raise ConfigError(
            f"profile: {len(batches)} batches and {len(contexts)} contexts are too few samples to "
            "tell fixed parts from those that grow; wanted two or more of each"
        )
