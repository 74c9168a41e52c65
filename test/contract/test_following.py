"""Ranks that follow rank 0: the same units in the same order, and what happens when one is lost."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import zmq
from peers import make_spec
from traffic import dispatch, exchange, rows_to
from transports import PATIENCE_S, Fleet, Rank, ReferenceExperts

from sglang_afd.errors import PeerLost
from sglang_afd.mlp.board import Counter
from sglang_afd.protocol.messages import Kind, StepIntent, Withdrawal
from sglang_afd.transport import zmq_follower
from sglang_afd.transport.base import (
    Announced,
    Arrived,
    FollowerGone,
    FollowerJoined,
    LeaderFound,
    LeaderLost,
    Link,
    Ordered,
    PeerAttached,
    PeerGone,
)
from sglang_afd.transport.zmq_follower import ZmqFollower
from sglang_afd.transport.zmq_handshake import GreetOptions

SPEC = make_spec()


def layers_of(rank: Rank) -> list[int]:
    return [exchange.header.layer_id for exchange in rank.served]


def start(fleet: Fleet, ep_size: int) -> ReferenceExperts:
    experts = ReferenceExperts(SPEC, ep_size, seed=3)
    fleet.start(SPEC, experts.run, ep_size, has_rounds=True)
    fleet.ranks[0].wait_for(FollowerJoined, ep_size - 1)
    for rank in fleet.ranks[1:]:
        rank.wait_for(LeaderFound)
    return experts


def decode(link: Link, experts: ReferenceExperts, num_steps: int, failures: list[str]) -> None:
    for step in range(1, num_steps + 1):
        for layer_id in SPEC.moe_layer_ids:
            rows = rows_to(SPEC, (step + layer_id) % SPEC.num_experts)
            got = exchange(link, rows, step=step, layer_id=layer_id, num_micro_batches=1)
            if not torch.equal(got, experts.expected(layer_id, rows)):
                failures.append(f"step {step}, layer {layer_id}")


def at_once(*works: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_rank_runs_the_decode_units_of_rank_0_in_its_order(fleet: Fleet) -> None:
    experts = start(fleet, 3)
    links = [fleet.attach(SPEC) for _ in range(3)]
    failures: list[str] = []

    at_once(*(lambda link=link: decode(link, experts, 20, failures) for link in links))

    assert failures == []
    orders = [
        [event.order for event in rank.events if isinstance(event, Ordered)]
        for rank in fleet.ranks[1:]
    ]
    assert orders[0] == orders[1] != []
    assert [order.sequence for order in orders[0]] == list(range(1, len(orders[0]) + 1))
    epochs = {link.epoch for link in links}
    assert {member.epoch for order in orders[0] for member in order.members} == epochs
    assert layers_of(fleet.ranks[1]) == layers_of(fleet.ranks[2]) == layers_of(fleet.ranks[0])


def test_nothing_runs_while_a_rank_does_not_follow(fleet: Fleet) -> None:
    experts = ReferenceExperts(SPEC, 2, seed=3)
    fleet.start(SPEC, experts.run, 2, has_rounds=True, are_followed=False)
    link, failures = fleet.attach(SPEC), []
    thread = threading.Thread(target=lambda: decode(link, experts, 1, failures))
    thread.start()
    for rank in fleet.ranks:
        rank.wait_for(Arrived)
    served_before = [len(rank.served) for rank in fleet.ranks]

    fleet.follow(SPEC, fleet.ranks[1], 1)
    thread.join()

    assert served_before == [0, 0]
    assert failures == []


def test_a_rank_that_is_lost_sends_attention_servers_to_attach_again(fleet: Fleet) -> None:
    experts = start(fleet, 2)
    link = fleet.attach(SPEC)
    decode(link, experts, 1, [])

    fleet.ranks[1].stop()
    fleet.ranks[0].wait_for(FollowerGone)
    fleet.ranks[0].wait_for(PeerAttached)

    with pytest.raises(PeerLost):
        decode(link, experts, 1, [])
    assert fleet.ranks[0].count(PeerGone) <= 1


def test_rows_that_come_while_a_rank_is_lost_are_forgotten_with_their_peer(fleet: Fleet) -> None:
    start(fleet, 2)
    leader, follower = fleet.ranks
    link = fleet.attach(SPEC)
    leader.wait_for(PeerAttached)
    leader.hold_polls()
    dispatch(link, rows_to(SPEC, 0))
    follower.stop()

    leader.release_polls()
    leader.wait_for(FollowerGone)
    leader.wait_for(Arrived)
    leader.stop()

    counters = leader.board.read()
    assert (counters[Counter.PEERS], counters[Counter.WAITING]) == (0, 0)


def test_a_rank_whose_place_another_takes_hears_it(fleet: Fleet) -> None:
    experts = ReferenceExperts(SPEC, 3, seed=3)
    fleet.start(SPEC, experts.run, 3, has_rounds=True, are_followed=False)
    leader, first, second = fleet.ranks
    fleet.follow(SPEC, first, 1)
    leader.wait_for(FollowerJoined)

    fleet.follow(SPEC, second, 1)

    first.wait_for(LeaderLost)


def test_a_rank_hears_that_rank_0_is_gone(fleet: Fleet) -> None:
    start(fleet, 2)

    fleet.ranks[0].stop()

    fleet.ranks[1].wait_for(LeaderLost)


def test_only_rank_0_hears_of_steps_to_come(fleet: Fleet) -> None:
    start(fleet, 2)
    link = fleet.attach(SPEC)
    said = [
        StepIntent(epoch=link.epoch, step=4, num_rows=2, num_micro_batches=1, kind=Kind.DECODE),
        Withdrawal(epoch=link.epoch, step=4),
    ]

    for message in said:
        link.announce(message)
    fleet.ranks[0].wait_for(Announced, 2)

    heard = [event.message for event in fleet.ranks[0].events if isinstance(event, Announced)]
    assert heard == said
    assert fleet.ranks[1].count(Announced) == 0


def test_an_announcement_on_a_lost_link_is_silently_dropped(fleet: Fleet) -> None:
    start(fleet, 2)
    link = fleet.attach(SPEC)
    link.mark_lost("test")

    link.announce(Withdrawal(epoch=link.epoch, step=4))

    assert link.lost == "test"


@contextmanager
def following(leader: Rank, find: Callable[[], str]) -> Iterator[ZmqFollower]:
    options = GreetOptions(
        server_id="mlp-1",
        spec=SPEC,
        secret=b"",
        heartbeat_timeout_s=30.0,
        handshake_timeout_s=2 * PATIENCE_S,
    )
    follower = ZmqFollower(find, options, rank=1)
    try:
        yield follower
    finally:
        follower.close()


@pytest.fixture
def leader(zmq_fleet: Fleet) -> Rank:
    experts = ReferenceExperts(SPEC, 2, seed=3)
    zmq_fleet.start(SPEC, experts.run, 2, has_rounds=True, are_followed=False)
    return zmq_fleet.ranks[0]


def test_closing_ends_a_follower_that_is_about_to_reach_rank_0(leader: Rank) -> None:
    may_answer, is_asked = threading.Event(), threading.Event()

    def find() -> str:
        is_asked.set()
        assert may_answer.wait(PATIENCE_S)
        return leader.hub.address

    options = GreetOptions(server_id="mlp-1", spec=SPEC, secret=b"", heartbeat_timeout_s=30.0)
    follower = ZmqFollower(find, options, rank=1)
    assert is_asked.wait(PATIENCE_S)
    closing = threading.Thread(target=follower.close, daemon=True)
    closing.start()
    time.sleep(0.2)  # it waits for the thread now
    may_answer.set()
    closing.join(PATIENCE_S / 4)

    assert not closing.is_alive()


def test_an_address_where_nobody_listens_any_more_costs_no_handshake_timeout(
    leader: Rank, tmp_path: Path
) -> None:
    addresses = iter([f"ipc://{tmp_path}/nobody"])

    with following(leader, lambda: next(addresses, leader.hub.address)):
        leader.wait_for(FollowerJoined)


def test_a_follower_outlives_an_error_of_its_sockets(
    leader: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_connection, failures = zmq_follower.open_connection, [zmq.ZMQError(errno.EMFILE)]

    def fail_once(*args: object) -> object:
        if failures:
            raise failures.pop()
        return open_connection(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(zmq_follower, "open_connection", fail_once)

    with following(leader, lambda: leader.hub.address):
        leader.wait_for(FollowerJoined)

    assert failures == []
