"""The way from a doorbell to a launch, gone by a peer that does not exist."""

from __future__ import annotations

import pytest
from device_simulator import World

from sglang_afd.mlp.rehearsal import Rehearsal


def test_each_rehearsal_launches_once() -> None:
    launches: list[int] = []
    rehearsal = Rehearsal(lambda: launches.append(1))

    for _ in range(200):
        rehearsal.run()

    assert len(launches) == 200  # of more units than descriptors have room


@pytest.mark.parametrize("seed", range(4))
def test_a_loop_rehearses_only_while_nothing_is_in_flight(seed: int) -> None:
    world = World(seed)
    [rank] = world.ranks
    in_flight: list[int] = []

    class Counting:
        def run(self) -> None:
            in_flight.append(rank.device.num_submitted - rank.device.num_done)

    rank.loop._rehearsal = Counting()

    world.run()

    assert in_flight and not any(in_flight)
    assert len(in_flight) < world.now_s / 0.0003
