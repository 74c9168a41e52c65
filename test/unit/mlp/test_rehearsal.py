"""The way from a doorbell to a launch, gone by a peer that does not exist."""

from __future__ import annotations

from sglang_afd.mlp.rehearsal import Rehearsal


def test_each_rehearsal_launches_once() -> None:
    launches: list[int] = []
    rehearsal = Rehearsal(lambda: launches.append(1))

    for _ in range(200):
        rehearsal.run()

    assert len(launches) == 200  # of more units than descriptors have room
