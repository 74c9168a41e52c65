"""What the rounds are for, measured on real MLP ranks: dense expert runs, and nobody starves.

The attention peers replay what a real model dispatched (replay_peer.py). Everything is counted in
steps and expert runs, and one of several looks has to show it: what else runs on a busy machine may
hold a peer up for longer than rounds wait, but what is wrong with the rounds is so at each look.
"""

from __future__ import annotations

import logging
from pathlib import Path

import fleet
import pytest
import replay
from replay import Crowd, Peer
from servers import Server, Zygote

from sglang_afd.config import ROUNDS_VARIABLE

logger = logging.getLogger(__name__)

WARM_STEPS = 20
STEPS = 150
NUM_LOOKS = 5
DENSE = 3.5  # of four peers
ATTENTION_S = 0.002  # of a layer; sleeping, so that peers overlap on two cores
MARGIN = 3  # a peer may be so many times slower in company than its own speed explains


def _peers_per_decode_run(
    ranks: list[Server], peers: Crowd, num_micro_batches: int = 1, num_looks: int = 1
) -> list[float]:
    """Of each rank, while four equal peers do `STEPS` steps each; their sums are checked too.

    Looks again while the expert runs are not dense, `num_looks` times at most.
    """
    for part in range(4):
        peers.add(part, attention_s=ATTENTION_S, num_micro_batches=num_micro_batches)
    peers.wait_steps(WARM_STEPS)
    for _ in range(num_looks):
        before = [replay.counters(rank) for rank in ranks]
        peers.wait_steps(STEPS)
        after = [replay.counters(rank) for rank in ranks]
        density = [
            (end("decode_run_peers") - start("decode_run_peers"))
            / (end("decode_runs") - start("decode_runs"))
            for start, end in zip(before, after, strict=True)
        ]
        logger.info("peers per decode run of each rank: %s", density)
        if all(peers_per_run >= DENSE for peers_per_run in density):
            break
    assert [report.error for report in peers.stop()] == [""] * 4
    return density


@pytest.mark.parametrize(("ranks", "num_micro_batches"), [(1, 1), (2, 2)], indirect=["ranks"])
def test_an_expert_run_serves_four_aligned_peers(
    peers: Crowd, ranks: list[Server], num_micro_batches: int
) -> None:
    density = _peers_per_decode_run(ranks, peers, num_micro_batches, NUM_LOOKS)

    assert all(peers_per_run >= DENSE for peers_per_run in density), density


def test_without_rounds_an_expert_run_serves_one_peer(
    zygote: Zygote, qwen3: Path, trace: Path, tmp_path: Path
) -> None:
    """So it is the rounds that the test above measures."""
    with (
        fleet.mlp_group(zygote, qwen3, 1, env={ROUNDS_VARIABLE: "off"}) as ranks,
        replay.crowd(zygote, qwen3, trace, ranks[0].port, tmp_path) as peers,
    ):
        [density] = _peers_per_decode_run(ranks, peers)
        # The counters are read without a lock, so one may be a unit ahead of the other.
        assert abs(density - 1.0) < 0.01, density


def _starving(peers: Crowd) -> list[str]:
    """Peers of unequal speed that do far fewer steps than that explains beside a fast one.

    Looks again while there are any.
    """
    fast = peers.add(0, attention_s=ATTENTION_S)
    peers.wait_steps(1)
    # How many times longer a decode step of each takes than the fast one's, by its own doing.
    slowdown: dict[Peer, int] = {
        fast: 1,
        peers.add(1, attention_s=5 * ATTENTION_S): 5,
        peers.add(2, attention_s=ATTENTION_S, prefill_every=2): 2,
        peers.add(3, attention_s=ATTENTION_S, pause_every=20, pause_s=0.3): 4,
    }
    peers.wait_steps(1)
    for _ in range(NUM_LOOKS):
        before = {peer: peer.num_steps for peer in slowdown}
        peers.wait_steps(STEPS, [fast])
        done = {peer: peer.num_steps - start for peer, start in before.items()}
        starving = [
            f"{done[peer]} steps of {peer.plan}, {done[fast]} of the fast one"
            for peer, times in slowdown.items()
            if done[peer] * times * MARGIN < done[fast]
        ]
        if not starving:
            break
    assert [report.error for report in peers.stop()] == [""] * 4
    return starving


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2], indirect=True)
def test_nobody_starves_among_peers_of_unequal_speed(peers: Crowd) -> None:
    assert _starving(peers) == []


@pytest.mark.slow
def test_a_neglected_peer_would_be_noticed(
    zygote: Zygote, qwen3: Path, trace: Path, tmp_path: Path
) -> None:
    with (
        fleet.mlp_group(zygote, qwen3, 1, plant="neglect_the_second_peer") as ranks,
        replay.crowd(zygote, qwen3, trace, ranks[0].port, tmp_path) as peers,
    ):
        assert len(_starving(peers)) == 1
