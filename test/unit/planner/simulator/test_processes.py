"""Groups played side by side give what they give one after another."""

from __future__ import annotations

from dataclasses import replace

from simulated import both, deployment

from sglang_afd.planner.simulator.disturbance import TYPICAL


def test_processes_change_nothing_but_the_time_it_takes() -> None:
    disturbance = replace(TYPICAL, prefill_per_step=0.1)

    _, one = both(deployment(8, 4, 2), disturbance)
    _, two = both(deployment(8, 4, 2), disturbance, num_processes=2)

    assert two == one
