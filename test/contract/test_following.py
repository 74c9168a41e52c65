"""Ranks that follow rank 0: the same units in the same order, and what happens when one is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from peers import make_spec
from traffic import exchange, rows_to
from transports import Fleet, ReferenceExperts

from sglang_afd.errors import PeerLost
from sglang_afd.protocol.messages import Kind, StepIntent, Withdrawal
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

SPEC = make_spec()


def layers_of(rank: object) -> list[int]:
    return [exchange.header.layer_id for exchange in rank.served]  # type: ignore[attr-defined]


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
