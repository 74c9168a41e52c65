"""What a run will do and about how long it will take, told before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from step.cases import Case, Setup

# Seconds, as seen on one H200 with the 30B shape; rough, for deciding what fits.
_IMPORT_S = 25.0
_FIRST_KERNELS_S = 35.0  # of a fresh machine: kernels are compiled or loaded once
_BLOCK_S = {"colocated": 9.0, "afd": 18.0}  # start, weights, graphs, end
_CASE_S = 1.5  # prefill of the tail, routing
_STEP_S = 0.025
_PROFILE_S = 5.0


def estimate_s(setup: Setup, cases: Sequence[Case], blocks: int) -> float:
    """Of the whole run on a GPU."""
    steps = setup.warm_steps + setup.steps
    of_cases = len(cases) * (_CASE_S + steps * _STEP_S)
    profiles = 2 * len(cases) * _PROFILE_S if setup.profile_steps else 0.0
    pair = sum(_BLOCK_S.values()) + 2 * of_cases
    return _IMPORT_S + _FIRST_KERNELS_S + blocks * pair + profiles


def describe(setup: Setup, cases: Sequence[Case], blocks: int) -> str:
    """For people."""
    names = ", ".join(case.name for case in cases)
    text = (
        f"plan: {blocks} x (stock SGLang, then {setup.num_attn} attention and {setup.num_mlp} MLP) "
        f"of {setup.model} on {setup.device}; cases {names}; {setup.steps} steps each"
    )
    if setup.device == "cpu":
        return text
    return text + f"; about {estimate_s(setup, cases, blocks):.0f} s"
