"""Ranks and peers that die, stall, come back or fail: an error in bounded time, for one only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zmq
from peers import make_gate, make_spec
from torch import Tensor
from traffic import SEED, dispatch, exchange, rows_to
from transports import PATIENCE_S, Fleet, ReferenceExperts

from sglang_afd.errors import ExchangeFailed, PeerLost
from sglang_afd.mlp.board import Counter
from sglang_afd.protocol import codec
from sglang_afd.protocol.messages import Hello, Kind
from sglang_afd.transport.base import Arrived, Link, PeerAttached, PeerGone, Rows
from sglang_afd.transport.zmq_link import LinkOptions, ZmqLink

SPEC = make_spec()


def experts(ep_size: int) -> ReferenceExperts:
    return ReferenceExperts(SPEC, ep_size, SEED)


def meanwhile(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def works(link: Link, ep_size: int = 1) -> None:
    rows = rows_to(SPEC, 3)
    assert torch.equal(exchange(link, rows), experts(ep_size).expected(1, rows))


def detach(link: Link) -> None:
    link.close()


def vanish(link: Link) -> None:
    """End a link without a goodbye."""
    link.mark_lost("killed by the test")
    link.close()


def test_a_rank_that_dies_while_a_combine_waits_loses_the_group(fleet: Fleet) -> None:
    ranks = fleet.start(SPEC, experts(2).run, 2)
    link = fleet.attach(SPEC)
    ranks[1].pause()
    dispatch(link, rows_to(SPEC, 0))
    ranks[1].wait_for(Arrived)

    killer = meanwhile(ranks[1].stop)
    with pytest.raises(PeerLost, match="the connection to MLP rank 1 ended"):
        link.combine(0)
    killer.join(PATIENCE_S)

    assert link.lost == "the connection to MLP rank 1 ended"
    with pytest.raises(PeerLost, match="the connection to MLP rank 1 ended"):
        dispatch(link, rows_to(SPEC, 0), micro_batch_id=1)


def test_ranks_that_stall_are_named_when_the_deadline_passes(fleet: Fleet) -> None:
    ranks = fleet.start(SPEC, experts(3).run, 3)
    link = fleet.attach(SPEC, stall_timeout_s=1.0)
    ranks[0].pause()
    ranks[2].pause()
    dispatch(link, rows_to(SPEC, 0))
    ranks[1].wait_replied()

    with pytest.raises(PeerLost, match=r"(MLP rank\(s\) \[0, 2\]|2 of 3 MLP ranks) did not reply"):
        link.combine(0)

    assert link.lost is not None


def test_a_stall_shorter_than_the_deadline_is_only_a_wait(fleet: Fleet) -> None:
    [rank] = fleet.start(SPEC, experts(1).run)
    link, rows = fleet.attach(SPEC), rows_to(SPEC, 3)
    rank.pause()
    dispatch(link, rows)
    rank.wait_for(Arrived)

    waker = meanwhile(rank.resume)
    total = link.combine(0)
    waker.join(PATIENCE_S)

    assert torch.equal(total, experts(1).expected(1, rows))
    assert link.lost is None


def test_another_thread_can_end_a_wait_and_the_first_reason_stands(fleet: Fleet) -> None:
    [rank] = fleet.start(SPEC, experts(1).run)
    link = fleet.attach(SPEC)
    rank.pause()
    dispatch(link, rows_to(SPEC, 3))

    other = meanwhile(lambda: (link.mark_lost("the first reason"), link.mark_lost("the second")))
    with pytest.raises(PeerLost, match="^the first reason$"):
        link.combine(0)
    other.join(PATIENCE_S)

    assert link.lost == "the first reason"


@pytest.mark.parametrize("leave", [detach, vanish])
def test_a_peer_that_leaves_while_its_exchange_waits_disturbs_nobody(
    fleet: Fleet, leave: Callable[[Link], None]
) -> None:
    [rank] = fleet.start(SPEC, experts(1).run)
    leaver, stayer = fleet.attach(SPEC, server_id="leaver"), fleet.attach(SPEC, server_id="stayer")
    rows = rows_to(SPEC, 3)
    rank.pause()
    dispatch(leaver, rows_to(SPEC, 5))
    rank.wait_for(Arrived, 1)
    dispatch(stayer, rows)
    rank.wait_for(Arrived, 2)

    leave(leaver)
    rank.wait_for(PeerGone)
    rank.resume()

    assert torch.equal(stayer.combine(0), experts(1).expected(1, rows))
    [gone] = [event for event in rank.events if isinstance(event, PeerGone)]
    assert gone.server_id == "leaver"
    assert gone.reason == ("detached" if leave is detach else "its connection ended")
    assert [served.rows.topk_ids.unique().tolist() for served in rank.served] == [[3]]


def test_a_peer_that_leaves_makes_room_for_another(fleet: Fleet) -> None:
    [rank] = fleet.start(SPEC, experts(1).run, max_peers=1)
    first = fleet.attach(SPEC)
    works(first)

    first.close()
    rank.wait_for(PeerGone)

    works(fleet.attach(SPEC))


def test_a_peer_that_left_is_parked_no_longer(fleet: Fleet) -> None:
    [rank] = fleet.start(SPEC, experts(1).run, has_rounds=True)
    decoding, parked = fleet.attach(SPEC), fleet.attach(SPEC)
    first, second, third = SPEC.moe_layer_ids
    exchange(decoding, rows_to(SPEC, 3), layer_id=first, num_micro_batches=1)
    dispatch(parked, rows_to(SPEC, 3), layer_id=third, num_micro_batches=1)
    rank.wait_for(Arrived, 2)
    exchange(decoding, rows_to(SPEC, 3), layer_id=second, num_micro_batches=1)

    decoding.close()
    parked.close()
    rank.wait_for(PeerGone, 2)
    rank.stop()

    assert rank.board.read()[Counter.PARKED_NOW] == 0


def test_a_reply_to_a_peer_that_left_is_skipped(fleet: Fleet) -> None:
    left = threading.Event()

    def run(rank: int, layer_id: int, rows: Rows) -> Tensor:
        if rows.topk_ids[0, 0] == 5:
            assert left.wait(PATIENCE_S)
        return experts(1).run(rank, layer_id, rows)

    fleet.start(SPEC, run)
    leaver, stayer = fleet.attach(SPEC), fleet.attach(SPEC)
    dispatch(leaver, rows_to(SPEC, 5))

    vanish(leaver)
    left.set()

    works(stayer)


def test_an_exchange_whose_experts_fail_loses_the_group_but_not_the_rank(fleet: Fleet) -> None:
    def run(rank: int, layer_id: int, rows: Rows) -> Tensor:
        if rows.topk_ids[0, 0] == 5:
            raise ValueError("expert 5 is broken")
        return experts(1).run(rank, layer_id, rows)

    fleet.start(SPEC, run)
    unlucky, lucky = fleet.attach(SPEC), fleet.attach(SPEC)

    told = "MLP rank 0 declined an exchange: the experts failed: expert 5 is broken"
    with pytest.raises(ExchangeFailed, match=told):
        exchange(unlucky, rows_to(SPEC, 5))

    works(lucky)


def test_nothing_is_run_or_measured_of_a_prefill_whose_first_piece_failed(fleet: Fleet) -> None:
    spec = make_spec(max_rows=2000)
    plain = ReferenceExperts(spec, 1, SEED)

    def run(rank: int, layer_id: int, rows: Rows) -> Tensor:
        if rows.topk_ids[0, 0] == 5:
            raise RuntimeError("out of memory")
        return plain.run(rank, layer_id, rows)

    [rank] = fleet.start(spec, run, has_rounds=True)
    decoding, unlucky = fleet.attach(spec), fleet.attach(spec)
    exchange(decoding, rows_to(spec, 3), layer_id=0, num_micro_batches=1)

    with pytest.raises(ExchangeFailed, match="out of memory"):
        exchange(unlucky, rows_to(spec, 5, 2000), kind=Kind.PREFILL, num_micro_batches=1)
    exchange(decoding, rows_to(spec, 3), layer_id=1, num_micro_batches=1)

    assert rank.num_units == 3


def test_a_restarted_group_is_met_under_another_epoch(fleet: Fleet) -> None:
    fleet.start(SPEC, experts(2).run, 2, boot_id="aaaaaaaa00000000")
    before = fleet.attach(SPEC)
    works(before, 2)
    for rank in fleet.ranks:
        rank.stop()

    fleet.start(SPEC, experts(2).run, 2, boot_id="bbbbbbbb00000000")
    after = fleet.attach(SPEC)

    works(after, 2)
    assert after.epoch != before.epoch
    assert {answer.boot_id for answer in after.ranks} == {"bbbbbbbb00000000"}
    with pytest.raises(PeerLost):
        exchange(before, rows_to(SPEC, 3))


def test_every_attachment_has_an_epoch_of_its_own(fleet: Fleet) -> None:
    [rank] = fleet.start(SPEC, experts(1).run)

    epochs = [fleet.attach(SPEC).epoch for _ in range(3)]

    rank.wait_for(PeerAttached, 3)
    assert len(set(epochs)) == 3
    assert [e.epoch for e in rank.events if isinstance(e, PeerAttached)] == epochs


def test_an_exchange_of_an_older_epoch_is_refused_and_the_rank_goes_on(fleet: Fleet) -> None:
    [rank] = fleet.start(SPEC, experts(1).run)
    older, newer = fleet.attach(SPEC), fleet.attach(SPEC)

    with pytest.raises(PeerLost) as caught:
        exchange(newer, rows_to(SPEC, 3), epoch=older.epoch)

    assert (
        f"the message carries epoch {older.epoch}, this session is at {newer.epoch}; attach again"
        in str(caught.value)
    )
    assert rank.served == []
    works(older)


def test_closing_is_idempotent_and_outlives_the_ranks(fleet: Fleet) -> None:
    [rank] = fleet.start(SPEC, experts(1).run)
    link = fleet.attach(SPEC)
    rank.stop()

    link.close()
    link.close()
    rank.hub.close()


def test_a_rank_that_dies_between_challenge_and_attach_is_lost_in_bounded_time(
    tmp_path: Path,
) -> None:
    address = f"ipc://{tmp_path}/exchange"
    gone = threading.Event()

    def challenge_and_die() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(address)
            bound.set()
            peer, hello = socket.recv_multipart()
            message = codec.decode_to_mlp(hello)
            assert isinstance(message, Hello)
            challenge = make_gate().on_hello(peer, message)
            socket.send_multipart([peer, codec.encode(challenge)])
        gone.set()

    bound = threading.Event()
    rank = threading.Thread(target=challenge_and_die)
    rank.start()
    assert bound.wait(PATIENCE_S)
    options = LinkOptions(
        server_id="attn-0",
        spec=SPEC,
        secret=b"",
        heartbeat_timeout_s=PATIENCE_S,
        stall_timeout_s=PATIENCE_S,
        handshake_timeout_s=PATIENCE_S,
    )

    with pytest.raises(PeerLost, match="went away"):  # and not by waiting for an answer
        ZmqLink([address], options)

    rank.join(PATIENCE_S)
    assert gone.is_set()
