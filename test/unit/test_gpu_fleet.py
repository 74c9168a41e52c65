"""The GPU tests' covering set covers what it says."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations

from gpu_fleet import COMBINATIONS, COVERING

VALUES = {
    "family": ("qwen3", "qwen2"),
    "precision": ("exact", "fast"),
    "has_graphs": (True, False),
    "num_micro_batches": (1, 2),
    "num_attn": (1, 2, 3),
    "num_mlp": (1, 2),
}


def test_every_two_values_stand_together_in_one_combination() -> None:
    wanted = {
        ((one, a), (other, b))
        for one, other in combinations(VALUES, 2)
        for a in VALUES[one]
        for b in VALUES[other]
    }

    covered = {pair for row in COVERING for pair in combinations(tuple(asdict(row).items())[:6], 2)}

    assert wanted - covered == set()


def test_there_are_at_most_ten_with_both_policies_and_both_transports() -> None:
    assert len(COMBINATIONS) <= 10
    assert {row.wait_policy for row in COMBINATIONS} == {"poll", "memop"}
    assert {row.transport for row in COMBINATIONS} == {"cuda_ipc", "zmq"}
