"""What a run will do and about how long it will take, told before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from step.cases import Case, Setup, Variant, cases_of

# Seconds, as seen on one H200 with the 30B shape; rough, for deciding what fits.
_IMPORT_S = 38.0
_FIRST_KERNELS_S = 50.0  # of a fresh machine: kernels are compiled or loaded once
_BLOCK_S = {"colocated": 5.0, "afd": 8.0}  # start, weights, graphs, end
_CASE_S = 0.5  # prefill of the tail, routing
_STEP_S = 0.025
_PROFILE_S = 1.5


def estimate_s(variants: Sequence[Variant], blocks: int) -> float:
    """Of the whole run on a GPU."""
    stock = _block_s("colocated", variants[0].setup, cases_of(variants))
    split = [_block_s("afd", variant.setup, variant.cases) for variant in variants]
    turn_s = stock + sum(split)
    profiled = len(cases_of(variants)) + sum(len(variant.cases) for variant in variants)
    profiles_s = profiled * _PROFILE_S if variants[0].setup.profile_steps else 0.0
    return _IMPORT_S + _FIRST_KERNELS_S + blocks * turn_s + profiles_s


def _block_s(side: str, setup: Setup, cases: Sequence[Case]) -> float:
    steps = setup.warm_steps + 2 * setup.steps
    return _BLOCK_S[side] + len(cases) * (_CASE_S + steps * _STEP_S)


def describe(variants: Sequence[Variant], blocks: int) -> str:
    """For people."""
    setup = variants[0].setup
    sides = "; ".join(
        f"{variant.setup.label} ({', '.join(case.name for case in variant.cases)})"
        for variant in variants
    )
    text = (
        f"plan: {blocks} x (stock SGLang, then attention + MLP servers: {sides}) "
        f"of {setup.model} on {setup.device}; {setup.steps} steps each"
    )
    if setup.device == "cpu":
        return text
    return text + f"; about {estimate_s(variants, blocks):.0f} s"
