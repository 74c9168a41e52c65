"""Any number of attention servers with any number of MLP ranks, which come and go as they like.

The peers replay what a real model dispatched (replay_peer.py), so that eight of them fit on two
cores; the MLP ranks are real servers.
"""

from __future__ import annotations

import signal
from pathlib import Path

import checkpoints
import fleet
import pytest
import replay
import replay_trace
from replay import Crowd
from servers import Server, Zygote

NUM_STEPS = 30


def _add_different_peers(peers: Crowd, count: int) -> None:
    for number in range(count):
        peers.add(
            part=number,
            num_micro_batches=1 + number % 2,
            prefill_every=7 + number,
            attention_s=0.001 * (number % 3),
        )


def _check_right(peers: Crowd) -> None:
    reports = peers.stop()
    assert [report.error for report in reports] == [""] * len(reports)
    assert all(report.num_steps >= NUM_STEPS for report in reports)
    assert all(report.largest_error > 0 for report in reports)  # it did compare


# Sorted by ranks, which are started once for each number of them. 16 experts on three ranks are
# 6, 6 and 4: the last has two phantom experts.
@pytest.mark.parametrize(
    ("num_peers", "ranks"),
    [(1, 1), (3, 1), (8, 1), (1, 2), (2, 3), (4, 3)],
    indirect=["ranks"],
    ids=lambda number: str(number),
)
def test_every_peer_gets_its_own_sums_at_any_ratio(
    peers: Crowd, ranks: list[Server], num_peers: int
) -> None:
    _add_different_peers(peers, num_peers)

    peers.wait_steps(NUM_STEPS)

    _check_right(peers)
    for rank in ranks:
        rank.wait("/afd/v1/status", lambda body: body["attached_peers"] == 0)


@pytest.mark.slow
def test_a_rank_of_mostly_phantom_experts_takes_part(
    zygote: Zygote, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tmp_path_factory.mktemp("seven") / "model"
    checkpoints.make_qwen3_moe(model, num_experts=7)
    trace = replay_trace.record(model, tmp_path / "trace.pt", num_parts=2)
    with (
        fleet.mlp_group(zygote, model, 3) as ranks,
        replay.crowd(zygote, model, trace, ranks[0].port, tmp_path) as peers,
    ):
        shares = [rank.get("/server_info")[1] for rank in ranks]
        _add_different_peers(peers, 2)

        peers.wait_steps(NUM_STEPS)

        _check_right(peers)
    assert [(share["first_expert"], share["stop_expert"]) for share in shares] == [
        (0, 3),
        (3, 6),
        (6, 7),
    ]


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)], indirect=True)
def test_peers_that_join_leave_and_die_do_not_disturb_those_that_decode(
    peers: Crowd, ranks: list[Server]
) -> None:
    lost_before = [replay.counters(rank)("lost_peers") for rank in ranks]
    steady = [peers.add(part, num_micro_batches=1 + part) for part in range(2)]
    peers.wait_steps(NUM_STEPS)

    for part in range(2, 5):
        polite = peers.add(part)
        doomed = peers.add(part + 3, num_micro_batches=2, prefill_every=3)
        peers.wait_steps(5, [*steady, polite, doomed])
        doomed.server.signal(signal.SIGKILL)
        doomed.server.wait_ended()
        peers.peers.remove(doomed)
        peers.wait_steps(5, [*steady, polite])
        assert polite.stop().error == ""
        peers.peers.remove(polite)
        peers.wait_steps(5, steady)

    for rank, lost in zip(ranks, lost_before, strict=True):
        rank.wait("/afd/v1/status", lambda body: body["attached_peers"] == 2)
        # Those that left said so; on a busy machine a goodbye may come too late, but not all three.
        assert lost + 3 <= replay.counters(rank)("lost_peers") < lost + 6
    _check_right(peers)


def test_replies_to_the_wrong_peer_would_be_noticed(
    zygote: Zygote, qwen3: Path, trace: Path, tmp_path: Path
) -> None:
    with (
        fleet.mlp_group(zygote, qwen3, 1, plant="mix_up_replies") as ranks,
        replay.crowd(zygote, qwen3, trace, ranks[0].port, tmp_path) as peers,
    ):
        _add_different_peers(peers, 4)
        with pytest.raises(AssertionError, match="WrongSum"):
            peers.wait_steps(NUM_STEPS)
