from __future__ import annotations

import pytest

from sglang_afd.mlp.rank_order import LONG_S, RankOrder, make_rank_order
from sglang_afd.protocol.messages import RunUnit
from sglang_afd.rounds.units import Member

PEER = b"attn"


def rows() -> Member:
    return Member(peer=PEER, micro_batch_id=0, step=1, layer_id=0, num_rows=3)


def leader(said: list[RunUnit]) -> RankOrder:
    order = make_rank_order(said.append, [0, 1], rank=0, ep_size=3)
    order.peer_attached(PEER, 7, 0.0)
    order.follower_joined(1)
    return order


def test_a_unit_is_told_to_the_other_ranks_before_it_runs() -> None:
    said: list[RunUnit] = []
    order = leader(said)
    order.follower_joined(2)
    order.arrived(rows(), 0.0)

    unit = order.next_unit(0.0)

    assert unit is not None
    assert [(message.sequence, message.layer_id) for message in said] == [(unit.sequence, 0)]
    assert [member.epoch for member in said[0].members] == [7]


def test_nothing_runs_before_every_rank_follows() -> None:
    said: list[RunUnit] = []
    order = leader(said)
    order.arrived(rows(), 0.0)

    assert (order.next_unit(1.0), order.wake_at_s(1.0), said) == (None, None, [])


def test_rows_that_wait_long_for_a_rank_to_follow_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order = leader([])
    order.arrived(rows(), 0.0)

    for now_s in (0.0, LONG_S - 0.001, LONG_S, 2 * LONG_S):
        order.next_unit(now_s)

    [record] = caplog.records
    assert "MLP rank(s) [2] do not follow" in record.message


def test_a_rank_that_is_lost_again_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    order = leader([])
    order.arrived(rows(), 0.0)
    order.next_unit(LONG_S)
    order.follower_joined(2)
    order.follower_gone(1)
    order.arrived(rows(), 2 * LONG_S)

    order.next_unit(3 * LONG_S)

    assert "MLP rank(s) [1] do not follow" in caplog.messages[-1]
    assert len(caplog.messages) == 2


def test_first_come_first_served_needs_nobody_to_follow() -> None:
    order = make_rank_order(pytest.fail, [0, 1], rank=0, ep_size=3, has_rounds=False)
    order.peer_attached(PEER, 7, 0.0)
    order.arrived(rows(), 0.0)

    assert order.next_unit(0.0) is not None
