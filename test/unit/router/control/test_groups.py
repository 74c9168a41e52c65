from __future__ import annotations

import pytest
from router_servers import (
    GONE_S,
    OTHER,
    TTL_S,
    FakeServer,
    a_plane,
    attn,
    load_of,
    mlp,
    pass_probes,
    register_all,
    renew_all,
)

from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.probe import Outcome
from sgl_router_afd.control.ratio import Ratio
from sgl_router_afd.control.routing import Candidates, Hold, NoRoute
from sgl_router_afd.control.standing import GroupState, Standing
from sglang_afd.protocol.registration import Condition, PeerLoss, Shard

HOLD_S = 10.0  # as a control plane has it unless told otherwise


def state(plane: ControlPlane, name: str = "group-1") -> tuple[GroupState, str]:
    stand = plane.groups.views[name].stand
    return stand.state, stand.reason


def members(plane: ControlPlane) -> dict[str, set[str]]:
    return {name: set(view.stands) for name, view in plane.groups.views.items()}


def traffic(plane: ControlPlane, model: str | None = "tiny") -> tuple[str, ...]:
    found = plane.route(model)
    return found.server_ids if isinstance(found, Candidates) else ()


def ready_group(*names: str) -> tuple[ControlPlane, FakeServer, list[FakeServer]]:
    """A READY group of one MLP server and these attention servers, at 0 s."""
    plane, expert = a_plane(), mlp("mlp-0")
    servers = [attn(name).attach(expert) for name in names or ("attn-0",)]
    register_all(plane, 0.0, expert, *servers)
    pass_probes(plane, 0.0)
    return plane, expert, servers


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_servers_form_a_group_in_any_order(order: tuple[int, ...]) -> None:
    plane = a_plane()
    servers = [mlp("mlp-0", 0, 2), mlp("mlp-1", 1, 2), attn("attn-0"), attn("attn-1")]

    register_all(plane, 0.0, *(servers[index] for index in order))

    assert members(plane) == {"group-1": {"mlp-0", "mlp-1", "attn-0", "attn-1"}}
    assert plane.groups.homeless == {}
    assert state(plane)[0] is GroupState.WIRING


def test_a_group_goes_from_forming_over_wiring_to_ready() -> None:
    plane = a_plane()
    first, second, server = mlp("mlp-0", 0, 2), mlp("mlp-1", 1, 2), attn("attn-0")

    seen = []
    for step in (
        lambda: first.register(plane, 0.0),
        lambda: second.register(plane, 0.0),
        lambda: server.register(plane, 0.0),
        lambda: server.attach(first).renew(plane, 1.0),
        lambda: server.attach(first, second).renew(plane, 2.0),
        lambda: pass_probes(plane, 2.0),
    ):
        step()
        seen.append(state(plane))

    assert seen == [
        (
            GroupState.FORMING,
            "of its 2 MLP servers rank 1 is not there; start it with the same --ep-size",
        ),
        (
            GroupState.FORMING,
            "no attention server has joined it; start one, or look at --ratio",
        ),
        (GroupState.WIRING, "attn-0 is waiting (attaches to its MLP servers)"),
        (
            GroupState.WIRING,
            "attn-0 is waiting (is not attached to mlp-1 (rank 1) of its group yet)",
        ),
        (GroupState.WIRING, "attn-0 is waiting (its pair probe has not been made yet)"),
        (GroupState.READY, "1 of 1 attention servers serve"),
    ]
    assert traffic(plane) == ("attn-0",)


def test_an_attention_server_is_told_where_rank_0_may_be_and_others_are_not() -> None:
    plane = a_plane()
    spare_url = "http://spare:30000"
    leader = mlp("mlp-0", 0, 2, peer_urls=("http://mlp-0:30000", spare_url))
    follower = mlp("mlp-1", 1, 2, peer_urls=("http://mlp-0:30000", spare_url))
    server, own = attn("attn-0"), attn("attn-1", peer_urls=(spare_url,))

    register_all(plane, 0.0, server, own, follower, leader)
    renew_all(plane, 1.0, server, own, follower, leader)

    told = {one.id: one.lease.mlp_urls for one in (server, own, follower, leader) if one.lease}
    assert told == {
        "attn-0": ("http://mlp-0:30000", spare_url),
        "attn-1": (),
        "mlp-1": (),
        "mlp-0": (),
    }
    assert list(members(plane).values()) == [{"attn-0", "attn-1", "mlp-0", "mlp-1"}]


def test_a_rank_without_an_address_of_rank_0_is_told_it() -> None:
    plane = a_plane()
    follower = mlp("mlp-1", 1, 2)
    register_all(plane, 0.0, follower, mlp("mlp-0", 0, 2))

    lease = follower.renew(plane, 1.0)

    assert lease.mlp_urls == ("http://mlp-0:30000",)


def test_ranks_join_the_rank_0_that_they_name_and_no_other() -> None:
    plane = a_plane()
    register_all(
        plane,
        0.0,
        mlp("x-1", 1, 2, peer_urls=("http://x-0:30000",)),
        mlp("y-0", 0, 2),
        mlp("x-0", 0, 2),
        mlp("y-1", 1, 2, peer_urls=("http://y-0:30000",)),
    )

    assert sorted(map(sorted, members(plane).values())) == [["x-0", "x-1"], ["y-0", "y-1"]]


def test_ranks_that_rank_0_hears_belong_to_it_though_addresses_differ() -> None:
    plane = a_plane()
    follower = mlp("mlp-1", 1, 2, peer_urls=("http://127.0.0.1:30000",))
    leader = mlp("mlp-0", 0, 2)
    register_all(plane, 0.0, follower, leader)

    leader.says(attached=(follower.boot_id,)).renew(plane, 1.0)

    assert list(members(plane).values()) == [{"mlp-0", "mlp-1"}]


def test_servers_of_another_model_have_no_group_and_a_reason() -> None:
    plane = a_plane()
    register_all(plane, 0.0, mlp("mlp-0"), attn("attn-0", fingerprint=OTHER))

    reason = plane.groups.homeless["attn-0"]

    assert reason == (
        "no MLP server has its model (cdcdcdcdcdcd); those registered have abababababab: "
        "start both roles with the same checkpoint"
    )


def test_a_name_of_a_model_never_means_another_model() -> None:
    plane = a_plane()
    expert, other = mlp("mlp-0"), mlp("mlp-1", fingerprint=OTHER)
    first = attn("attn-0").attach(expert)
    second = attn("attn-1", fingerprint=OTHER).attach(other)

    register_all(plane, 0.0, expert, other, first, second)
    pass_probes(plane, 0.0)

    assert traffic(plane) == ("attn-0",)
    assert "give this one another --served-model-name" in plane.groups.homeless["attn-1"]


def test_a_server_that_is_restarted_under_the_name_of_another_model_takes_it_from_nobody() -> None:
    plane = a_plane()
    expert, other = mlp("mlp-0"), mlp("mlp-1", fingerprint=OTHER)
    first = attn("attn-0").attach(expert)
    second = attn("attn-1", fingerprint=OTHER, models=("big",)).attach(other)
    register_all(plane, 0.0, expert, other, first, second)
    pass_probes(plane, 0.0)
    wrong = attn("attn-0", models=("big",), boot_id="boot-2", started_at_s=2000.0).attach(expert)

    wrong.register(plane, 1.0)

    assert traffic(plane, "big") == ("attn-1",)
    assert "attn-1 serves another model" in plane.groups.homeless["attn-0"]


def test_a_request_goes_to_the_groups_of_its_model() -> None:
    plane = a_plane()
    expert, other = mlp("mlp-0"), mlp("mlp-1", fingerprint=OTHER)
    first = attn("attn-0").attach(expert)
    second = attn("attn-1", fingerprint=OTHER, models=("big", "large")).attach(other)
    register_all(plane, 0.0, expert, other, first, second)
    pass_probes(plane, 0.0)

    assert traffic(plane, "tiny") == ("attn-0",)
    assert traffic(plane, "large") == ("attn-1",)
    plane.update(TTL_S)
    assert plane.route("huge") == NoRoute(
        http_status=404, reason="there is no model 'huge' here; there is big, large, tiny"
    )
    unnamed = plane.route(None)
    assert isinstance(unnamed, NoRoute) and unnamed.http_status == 400


def test_a_request_that_names_no_model_goes_to_the_only_one() -> None:
    plane, _, _ = ready_group("attn-0", "attn-1")

    assert traffic(plane, None) == ("attn-0", "attn-1")


def test_servers_of_one_group_may_say_different_names_of_its_model() -> None:
    plane, expert = a_plane(), mlp("mlp-0")
    old = attn("attn-0").attach(expert)
    new = attn("attn-1", models=("tiny", "tiny-v2")).attach(expert)
    register_all(plane, 0.0, expert, old, new)
    pass_probes(plane, 0.0)

    assert traffic(plane, "tiny") == ("attn-0", "attn-1")
    assert traffic(plane, "tiny-v2") == ("attn-1",)


def test_while_nobody_is_there_requests_can_wait() -> None:
    assert isinstance(a_plane().route("tiny"), Hold)


def test_a_name_that_nobody_has_can_wait_while_servers_may_still_register_again() -> None:
    plane, _, _ = ready_group()

    early = plane.route("huge")
    plane.update(TTL_S)
    late = plane.route("huge")

    assert isinstance(early, Hold) and "started a moment ago" in early.reason
    assert isinstance(late, NoRoute) and late.http_status == 404


def test_requests_wait_for_a_group_while_one_of_its_servers_is_restarted() -> None:
    plane, expert, [server] = ready_group()
    expert.says(is_draining=True).renew(plane, 1.0)
    draining = plane.route("tiny")
    expert.leave(plane, 2.0)
    away = state(plane)[0], plane.route("tiny")
    back = expert.restarted("mlp-0.boot-2")
    back.register(plane, 3.0)
    wiring = plane.route("tiny")
    server.attach(back).renew(plane, 4.0)
    pass_probes(plane, 4.0)

    assert traffic(plane) == ("attn-0",)
    assert away[0] is GroupState.DEAD
    assert [type(one) for one in (draining, away[1], wiring)] == [Hold, Hold, Hold]


@pytest.mark.parametrize("role", ["attn", "mlp"])
def test_requests_for_a_dead_group_wait_for_so_long_and_are_never_of_an_unknown_model(
    role: str,
) -> None:
    plane, expert, [server] = ready_group()
    leaving, staying = (server, expert) if role == "attn" else (expert, server)
    leaving.leave(plane, 1.0)

    early = plane.route("tiny")
    staying.renew(plane, 6.0)
    plane.update(1.0 + HOLD_S)
    late = plane.route("tiny")

    assert isinstance(early, Hold)
    assert isinstance(late, NoRoute) and late.http_status == 503
    assert f"all its {'attention' if role == 'attn' else 'MLP'} servers are gone" in late.reason


def test_requests_do_not_wait_for_a_group_that_an_operator_drains() -> None:
    plane, _, _ = ready_group()

    plane.drain_group("group-1", "maintenance", 1.0)

    assert plane.route("tiny") == NoRoute(
        http_status=503, reason="group-1 is draining: maintenance"
    )


def test_a_group_without_any_server_speaks_for_its_model_only_where_no_other_does() -> None:
    plane, expert, [server] = ready_group()
    server.leave(plane, 1.0)
    expert.leave(plane, 1.0)
    alone = plane.route(None)
    other = mlp("mlp-1", fingerprint=OTHER)
    register_all(plane, 2.0, other, attn("attn-1", fingerprint=OTHER).attach(other))
    pass_probes(plane, 2.0)

    assert isinstance(alone, Hold)
    assert plane.groups.views["group-1"].stand.state is GroupState.DEAD
    assert traffic(plane, None) == traffic(plane, "tiny") == ("attn-1",)


def test_without_a_ratio_groups_are_kept_even() -> None:
    plane = a_plane()
    register_all(plane, 0.0, mlp("mlp-0"), mlp("mlp-1"), *(attn(f"attn-{i}") for i in range(4)))

    sizes = [len(view.group.attn) for view in plane.groups.views.values()]

    assert sizes == [2, 2]


@pytest.mark.parametrize("ratio", [None, Ratio(num_attn=2, num_mlp=1)])
def test_a_group_that_loads_its_experts_gets_its_share_of_servers_that_come_meanwhile(
    ratio: Ratio | None,
) -> None:
    plane = a_plane(ratio=ratio)
    loading = mlp("mlp-1", exchange_address="").says(condition=Condition.LOADING)

    register_all(plane, 0.0, mlp("mlp-0"), loading, *(attn(f"attn-{i}") for i in range(4)))

    assert [len(view.group.attn) for view in plane.groups.views.values()] == [2, 2]


def test_a_group_whose_experts_have_not_all_an_owner_gets_new_servers_last() -> None:
    plane = a_plane()
    half = mlp("mlp-0", shard=Shard(ep_rank=0, ep_size=1, first_expert=0, stop_expert=4))

    register_all(plane, 0.0, half, mlp("mlp-1"), attn("attn-0"), attn("attn-1"))

    assert members(plane) == {"group-1": {"mlp-0"}, "group-2": {"mlp-1", "attn-0", "attn-1"}}


def test_with_a_ratio_one_group_is_filled_before_the_next_and_then_all_evenly() -> None:
    plane = a_plane(ratio=Ratio(num_attn=3, num_mlp=1))
    register_all(plane, 0.0, mlp("mlp-0"), mlp("mlp-1"))

    sizes = []
    for index in range(8):
        attn(f"attn-{index}").register(plane, 0.0)
        sizes.append(tuple(len(view.group.attn) for view in plane.groups.views.values()))

    assert sizes == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3), (4, 3), (4, 4)]


def test_a_server_that_joins_a_running_group_changes_its_epoch_and_no_traffic() -> None:
    plane, expert, [old] = ready_group()
    epoch = plane.groups.views["group-1"].epoch
    new = attn("attn-1")

    lease = new.register(plane, 1.0)

    assert (lease.group, lease.epoch, lease.mlp_urls) == (
        "group-1",
        epoch + 1,
        ("http://mlp-0:30000",),
    )
    assert old.renew(plane, 1.5).epoch == epoch + 1
    assert traffic(plane) == ("attn-0",)
    new.attach(expert).renew(plane, 2.0)
    assert traffic(plane) == ("attn-0",)
    pass_probes(plane, 2.0)
    assert traffic(plane) == ("attn-0", "attn-1")


def test_a_stalled_server_gets_no_new_requests_and_keeps_its_place() -> None:
    plane, expert, [first, second] = ready_group("attn-0", "attn-1")
    epoch = plane.groups.views["group-1"].epoch

    second.says(condition=Condition.STALLED, reason="rank 0 is gone", attached=()).renew(plane, 1.0)

    assert traffic(plane) == ("attn-0",)
    assert state(plane) == (
        GroupState.READY,
        "1 of 2 attention servers serve; attn-1 is degraded (stalled: rank 0 is gone)",
    )
    assert plane.groups.views["group-1"].epoch == epoch


def test_a_group_whose_servers_all_stall_is_degraded_and_requests_wait() -> None:
    plane, expert, [server] = ready_group()

    server.says(condition=Condition.STALLED, reason="rank 0 is gone", attached=()).renew(plane, 1.0)

    assert state(plane)[0] is GroupState.DEGRADED
    assert isinstance(plane.route("tiny"), Hold)


def test_after_a_stall_a_server_gets_requests_only_when_it_is_proved_again() -> None:
    plane, expert, [server] = ready_group()
    server.says(condition=Condition.STALLED, attached=()).renew(plane, 1.0)

    server.attach(expert).renew(plane, 2.0)

    assert traffic(plane) == ()
    assert pass_probes(plane, 2.0) == ["attn-0"]
    assert traffic(plane) == ("attn-0",)


def test_a_pair_that_fails_its_probe_is_degraded() -> None:
    plane, _, [server] = ready_group()
    plane.on_trouble("attn-0", "reset", 1.0, is_certain=False)
    [probe] = plane.start_probes(1.0)

    plane.end_probe(probe, Outcome.FAILED, "500", 2.0)
    plane.update(2.0)

    assert state(plane)[0] is GroupState.DEGRADED
    assert "its pair probe failed (500)" in state(plane)[1]


def test_a_peer_that_reports_a_loss_has_the_pair_probed_once() -> None:
    plane, expert, [server] = ready_group()

    loss = (PeerLoss(boot_id=server.boot_id, reason="silent for 1 s"),)
    expert.says(lost=loss).renew(plane, 1.0)

    assert traffic(plane) == ("attn-0",)
    assert pass_probes(plane, 1.0) == ["attn-0"]
    expert.renew(plane, 2.0)
    assert pass_probes(plane, 2.0) == []


def test_a_server_belongs_to_whom_it_hears_before_those_that_say_that_they_hear_it() -> None:
    plane = a_plane()
    experts = [mlp("mlp-0"), mlp("mlp-1")]
    servers = [attn(f"attn-{i}").attach(expert) for i, expert in enumerate(experts)]
    register_all(plane, 0.0, *experts, *servers)
    pass_probes(plane, 0.0)

    experts[0].says(attached=tuple(one.boot_id for one in servers)).renew(plane, 1.0)

    assert members(plane) == {"group-1": {"mlp-0", "attn-0"}, "group-2": {"mlp-1", "attn-1"}}
    assert traffic(plane) == ("attn-0", "attn-1")


def test_a_late_lease_takes_traffic_away_and_neither_place_nor_epoch() -> None:
    plane, expert, [first, second] = ready_group("attn-0", "attn-1")
    epoch = plane.groups.views["group-1"].epoch
    renew_all(plane, 5.0, expert, first)

    plane.update(TTL_S + 0.5)
    while_late = traffic(plane)
    second.renew(plane, TTL_S + 1)

    assert while_late == ("attn-0",)
    assert traffic(plane) == ("attn-0", "attn-1")
    assert plane.groups.views["group-1"].epoch == epoch


def test_a_late_mlp_server_is_mentioned_and_takes_nothing_away() -> None:
    plane, _, [server] = ready_group()
    server.renew(plane, 5.0)

    plane.update(TTL_S + 1)

    assert traffic(plane) == ("attn-0",)
    assert "mlp-0 is degraded (its lease ran out 1.0 s ago)" in state(plane)[1]


def test_a_group_that_loses_a_rank_is_degraded_and_its_successor_completes_it() -> None:
    plane = a_plane()
    ranks = [mlp("mlp-0", 0, 2), mlp("mlp-1", 1, 2)]
    server = attn("attn-0").attach(*ranks)
    register_all(plane, 0.0, *ranks, server)
    pass_probes(plane, 0.0)
    epoch = plane.groups.views["group-1"].epoch
    ranks[1].leave(plane, 1.0)
    assert state(plane)[0] is GroupState.DEGRADED

    spare = mlp("spare", 1, 2)
    spare.register(plane, 2.0)

    assert members(plane) == {"group-1": {"mlp-0", "spare", "attn-0"}}
    assert state(plane)[1] == (
        "attn-0 is waiting (is not attached to spare (rank 1) of its group yet)"
    )
    server.attach(ranks[0], spare).renew(plane, 3.0)
    pass_probes(plane, 3.0)
    assert state(plane)[0] is GroupState.READY
    assert plane.groups.views["group-1"].epoch == epoch + 2


def test_a_restarted_rank_that_waits_for_its_predecessors_lease_keeps_its_place() -> None:
    plane = a_plane()
    first, second = mlp("mlp-0", 0, 2), mlp("mlp-1", 1, 2)
    server = attn("attn-0").attach(first, second)
    register_all(plane, 0.0, first, second, server)
    pass_probes(plane, 0.0)
    epoch = plane.groups.views["group-1"].epoch

    anew = second.restarted("mlp-1.boot-2")
    anew.register(plane, 1.0)
    anew.says(condition=Condition.DISPLACED, reason="rank 1 is already served by its predecessor")
    anew.renew(plane, 1.5)
    waiting = state(plane)
    anew.says(condition=Condition.READY, reason="").renew(plane, 4.0)
    server.attach(first, anew).renew(plane, 4.0)
    pass_probes(plane, 4.0)

    assert waiting == (
        GroupState.DEGRADED,
        "MLP server mlp-1 waits for rank 1: rank 1 is already served by its predecessor",
    )
    assert state(plane)[0] is GroupState.READY
    assert plane.groups.views["group-1"].epoch == epoch + 1


def test_a_server_whose_rank_another_one_has_loses_its_place() -> None:
    plane = a_plane()
    first, second = mlp("mlp-0", 0, 2), mlp("mlp-1", 1, 2)
    register_all(plane, 0.0, first, second)
    spare = mlp("spare", 1, 2, peer_urls=(first.registration.url,))
    second.says(condition=Condition.DISPLACED, reason="rank 1 is served by spare")

    spare.register(plane, 1.0)
    second.renew(plane, 1.0)

    assert plane.groups.homeless == {"mlp-1": "displaced: rank 1 is served by spare"}
    assert members(plane)["group-1"] == {"mlp-0", "spare"}


def test_a_spare_and_a_displaced_server_have_no_group_and_a_reason() -> None:
    plane, _, _ = ready_group()
    spare = mlp("spare", shard=None).says(condition=Condition.SPARE)
    displaced = mlp("old").says(condition=Condition.DISPLACED, reason="rank 0 is served by mlp-0")

    register_all(plane, 1.0, spare, displaced)

    assert plane.groups.homeless == {
        "spare": "a spare: it takes the first rank that is missing",
        "old": "displaced: rank 0 is served by mlp-0",
    }


def test_a_rank_that_loads_leaves_the_group_forming() -> None:
    plane = a_plane()
    loading = mlp("mlp-0", exchange_address="").says(condition=Condition.LOADING)

    register_all(plane, 0.0, loading, attn("attn-0"))

    assert state(plane) == (
        GroupState.FORMING,
        "MLP server mlp-0 loads the experts of rank 0",
    )


def test_ranks_that_leave_experts_out_leave_the_group_forming() -> None:
    plane = a_plane()
    first = mlp("mlp-0", 0, 2)
    shard = first.registration.shard
    second = mlp(
        "mlp-1", 1, 2, shard=type(shard)(ep_rank=1, ep_size=2, first_expert=5, stop_expert=8)
    )

    register_all(plane, 0.0, first, second, attn("attn-0"))

    assert state(plane) == (
        GroupState.FORMING,
        "no MLP rank owns experts 4 to 4; start the missing rank",
    )


def test_a_group_without_mlp_servers_is_dead_until_they_are_back() -> None:
    plane, expert, [server] = ready_group()
    expert.leave(plane, 1.0)
    dead = state(plane)
    server.says(condition=Condition.DETACHED, reason="nobody is there", attached=())
    server.renew(plane, 2.0)

    back = expert.restarted("boot-2")
    back.register(plane, 3.0)

    assert dead[0] is GroupState.DEAD
    assert "all its MLP servers are gone; start them again" in dead[1]
    assert state(plane)[0] is GroupState.DEGRADED
    server.attach(back).renew(plane, 4.0)
    pass_probes(plane, 4.0)
    assert traffic(plane) == ("attn-0",)


def test_a_group_without_attention_servers_is_dead_and_wires_again_with_a_new_one() -> None:
    plane, expert, [server] = ready_group()
    server.leave(plane, 1.0)
    assert state(plane)[0] is GroupState.DEAD

    attn("attn-1").register(plane, 2.0)

    assert state(plane)[0] is GroupState.WIRING


def test_an_empty_group_is_forgotten_and_its_name_begins_with_a_larger_epoch() -> None:
    plane, expert, [server] = ready_group()
    epoch = plane.groups.views["group-1"].epoch
    plane.update(GONE_S)
    assert state(plane)[0] is GroupState.DEAD
    plane.update(GONE_S + 601)
    assert members(plane) == {}

    mlp("mlp-9", fingerprint=OTHER).register(plane, GONE_S + 602)

    assert plane.groups.views["group-1"].epoch > epoch + 1


def test_a_drained_server_gets_no_requests_and_may_stop_when_it_has_none() -> None:
    in_flight = {"attn-1": 1}
    plane, expert, [first, second] = ready_group("attn-0", "attn-1")
    plane._num_in_flight = lambda name: in_flight.get(name, 0)
    second.says(load=load_of(num_running=1, free_kv_tokens=1)).renew(plane, 0.5)

    plane.drain("attn-1", "an operator asked", 1.0)

    assert traffic(plane) == ("attn-0",)
    busy = second.renew(plane, 1.0)
    assert (busy.is_draining, busy.may_stop) == (True, False)
    second.says(load=load_of(num_running=0, free_kv_tokens=1))
    assert not second.renew(plane, 2.0).may_stop
    in_flight.clear()
    assert second.renew(plane, 3.0).may_stop


def test_a_drained_mlp_server_drains_its_group_and_may_stop_when_nobody_needs_it() -> None:
    plane, expert, [server] = ready_group()
    server.says(load=load_of(num_running=3, free_kv_tokens=1)).renew(plane, 0.5)

    lease = expert.says(is_draining=True).renew(plane, 1.0)

    assert state(plane) == (
        GroupState.DRAINING,
        "its MLP server mlp-0 is draining (it was asked to end)",
    )
    assert traffic(plane) == ()
    assert not lease.may_stop
    server.says(load=load_of(num_running=0, free_kv_tokens=1)).renew(plane, 2.0)
    assert expert.renew(plane, 3.0).may_stop


def test_a_group_can_be_drained_and_taken_back() -> None:
    plane, _, [server] = ready_group()

    plane.drain_group("group-1", "maintenance", 1.0)
    drained = state(plane), traffic(plane), server.renew(plane, 1.0).is_draining
    plane.drain_group("group-1", "", 2.0)

    assert drained == ((GroupState.DRAINING, "maintenance"), (), True)
    assert traffic(plane) == ("attn-0",)
    said = [event.text for event in plane.events]
    assert "group-1 drains: maintenance" in said and "group-1 drains no more" in said
    assert not plane.drain_group("group-7", "maintenance", 3.0)


def standings(plane: ControlPlane) -> dict[str, Standing]:
    return {name: stand.standing for name, stand in plane.groups.views["group-1"].stands.items()}


def test_the_servers_of_a_drained_group_drain_with_it_and_one_in_trouble_says_which() -> None:
    plane, _, [first, stalled, _] = ready_group("attn-0", "attn-1", "attn-2")
    stalled.says(condition=Condition.STALLED, reason="gone", attached=()).renew(plane, 0.5)
    attn("attn-3").register(plane, 0.5)

    plane.drain_group("group-1", "maintenance", 1.0)
    drained, lease = standings(plane), first.renew(plane, 1.0)
    plane.drain_group("group-1", "", 2.0)

    assert drained == {
        "mlp-0": Standing.DRAINING,
        "attn-0": Standing.DRAINING,
        "attn-1": Standing.DEGRADED,
        "attn-2": Standing.DRAINING,
        "attn-3": Standing.DRAINING,
    }
    assert lease.reason == "group-1 drains: maintenance"
    assert standings(plane) == {
        "mlp-0": Standing.SERVING,
        "attn-0": Standing.SERVING,
        "attn-1": Standing.DEGRADED,
        "attn-2": Standing.SERVING,
        "attn-3": Standing.WAITING,
    }


def test_the_attention_servers_of_an_mlp_server_that_drains_drain_with_it() -> None:
    plane = a_plane()
    ranks = [mlp("mlp-0", 0, 2), mlp("mlp-1", 1, 2)]
    server = attn("attn-0").attach(*ranks)
    register_all(plane, 0.0, *ranks, server)
    pass_probes(plane, 0.0)

    ranks[1].says(is_draining=True).renew(plane, 1.0)

    assert standings(plane) == {
        "mlp-0": Standing.SERVING,
        "mlp-1": Standing.DRAINING,
        "attn-0": Standing.DRAINING,
    }
    lease = server.renew(plane, 2.0)
    assert "group-1 drains: its MLP server mlp-1 is draining" in lease.reason
    assert not lease.is_draining  # it was not asked to end


def test_servers_with_addresses_of_mlp_servers_that_are_not_registered_serve_all_the_same() -> None:
    plane = a_plane()
    urls = ("http://elsewhere:30010",)
    first, second = attn("attn-0", peer_urls=urls), attn("attn-1", peer_urls=urls)
    unknown = mlp("unknown")

    register_all(plane, 0.0, first.attach(unknown), second)
    pass_probes(plane, 0.0)

    assert members(plane) == {"group-1": {"attn-0", "attn-1"}}
    assert traffic(plane) == ("attn-0",)


def test_they_join_the_group_of_their_mlp_servers_once_those_register() -> None:
    plane = a_plane()
    expert = mlp("mlp-0")
    server = attn("attn-0", peer_urls=(expert.registration.url,)).attach(expert)
    server.register(plane, 0.0)

    expert.register(plane, 1.0)

    assert list(members(plane).values()) == [{"attn-0", "mlp-0"}]


def test_a_group_whose_servers_are_all_in_another_one_is_not_shown_as_dead() -> None:
    plane = a_plane()
    expert = mlp("mlp-0")
    server = attn("attn-0", peer_urls=("http://localhost:30010",)).attach(expert)
    server.register(plane, 0.0)
    pass_probes(plane, 0.0)
    alone = traffic(plane)

    expert.register(plane, 1.0)

    assert alone == traffic(plane) == ("attn-0",)
    assert [view.stand.state for view in plane.groups.views.values()] == [GroupState.READY]


def test_a_drain_stays_in_force_when_the_mlp_servers_of_its_group_register() -> None:
    plane = a_plane()
    expert = mlp("mlp-0")
    server = attn("attn-0", peer_urls=(expert.registration.url,)).attach(expert)
    server.register(plane, 0.0)
    pass_probes(plane, 0.0)
    plane.drain_group("group-1", "move", 1.0)

    expert.register(plane, 2.0)

    assert members(plane) == {"group-1": {"attn-0", "mlp-0"}}
    assert state(plane) == (GroupState.DRAINING, "move")


def test_an_mlp_server_of_another_model_takes_no_group_whose_servers_name_it_or_that_it_names() -> (
    None
):
    plane = a_plane()
    server = attn("attn-0", peer_urls=("http://mlp-0:30000",)).attach(mlp("unknown"))
    server.register(plane, 0.0)
    pass_probes(plane, 0.0)

    plane.register(mlp("mlp-0", fingerprint=OTHER, group="group-1").registration, 1.0)
    plane.update(1.0)

    assert members(plane) == {"group-1": {"attn-0"}, "group-2": {"mlp-0"}}
    assert traffic(plane) == ("attn-0",)


def test_a_server_that_stalls_keeps_its_place_whatever_address_it_has_of_its_mlp_servers() -> None:
    plane, expert = a_plane(), mlp("mlp-0")
    server = attn("attn-0", peer_urls=("http://localhost:30010",)).attach(expert)
    register_all(plane, 0.0, expert, server)
    pass_probes(plane, 0.0)
    before = members(plane), plane.groups.views["group-1"].epoch

    server.says(condition=Condition.STALLED, reason="rank 0 is gone", attached=()).renew(plane, 1.0)

    assert (members(plane), plane.groups.views["group-1"].epoch) == before
    assert state(plane)[0] is GroupState.DEGRADED


def test_a_server_whose_addresses_lead_to_two_groups_is_where_it_attached_and_stays_there() -> None:
    plane = a_plane()
    experts = [mlp("mlp-0"), mlp("mlp-1")]
    urls = tuple(expert.registration.url for expert in experts)
    servers = [attn("attn-0").attach(experts[0]), attn("attn-1", peer_urls=urls).attach(experts[1])]
    register_all(plane, 0.0, *experts, *servers)
    pass_probes(plane, 0.0)
    attached = members(plane), traffic(plane)

    servers[1].says(condition=Condition.STALLED, attached=()).renew(plane, 1.0)

    there = {"group-1": {"mlp-0", "attn-0"}, "group-2": {"mlp-1", "attn-1"}}
    assert attached == (there, ("attn-0", "attn-1"))
    assert members(plane) == there


def test_such_a_server_keeps_its_place_while_its_mlp_server_is_restarted() -> None:
    plane, expert = a_plane(), mlp("mlp-0")
    server = attn("attn-0", peer_urls=(expert.registration.url,)).attach(expert)
    register_all(plane, 0.0, expert, server)
    pass_probes(plane, 0.0)
    server.says(condition=Condition.STALLED, reason="rank 0 is gone", attached=()).renew(plane, 1.0)

    expert.leave(plane, 2.0)
    between = members(plane)
    expert.restarted("boot-2").register(plane, 3.0)

    assert between == {"group-1": {"attn-0"}}
    assert members(plane) == {"group-1": {"attn-0", "mlp-0"}}


def test_a_server_that_is_restarted_with_other_mlp_servers_goes_there_once_it_is_attached() -> None:
    plane, _, _ = ready_group("attn-0", "attn-1")
    server = attn("attn-1", peer_urls=("http://elsewhere:1",), boot_id="b", started_at_s=2000.0)
    server.register(plane, 1.0)

    server.attach(mlp("unknown")).renew(plane, 2.0)
    pass_probes(plane, 2.0)

    assert members(plane) == {"group-1": {"mlp-0", "attn-0"}, "group-2": {"attn-1"}}
    assert traffic(plane) == ("attn-0", "attn-1")


def test_a_group_that_begins_anew_under_a_forgotten_name_is_an_event_again() -> None:
    plane = a_plane()
    for started_at_s in (1000.0, 2000.0):
        half = mlp("mlp-0", 0, 2, boot_id=f"boot-{started_at_s}", started_at_s=started_at_s)
        half.register(plane, 0.0)
        plane.remove("mlp-0", 0.0)

    texts = [event.text for event in plane.events]
    assert sum(text.startswith("group-1 is forming") for text in texts) == 2


def test_what_happened_is_told_as_events() -> None:
    plane, _, [server] = ready_group()

    server.says(condition=Condition.STALLED, reason="gone", attached=()).renew(plane, 1.0)

    texts = [event.text for event in plane.events]
    assert texts[0] == "mlp-0 registered, MLP rank 0 of 1 at http://mlp-0:30000"
    assert texts[-4:] == [
        "attn-0 is serving",
        "group-1 is ready: 1 of 1 attention servers serve",
        "attn-0 is degraded: stalled: gone",
        "group-1 is degraded: attn-0 is degraded (stalled: gone)",
    ]


def test_a_server_that_refuses_connections_gets_no_requests_until_its_probe_passed() -> None:
    plane, _, _ = ready_group("attn-0", "attn-1")

    plane.on_trouble("attn-1", "refuses connections", 1.0, is_certain=True)
    plane.update(1.0)

    assert traffic(plane) == ("attn-0",)
    assert pass_probes(plane, 1.0) == ["attn-1"]
    assert traffic(plane) == ("attn-0", "attn-1")


def test_a_probe_says_where_to_ask_a_token() -> None:
    plane, expert = a_plane(), mlp("mlp-0")
    register_all(plane, 0.0, expert, attn("attn-0").attach(expert))

    [probe] = plane.start_probes(0.0)

    assert (probe.server_id, probe.url) == ("attn-0", "http://attn-0:30000")
    assert plane.start_probes(0.0) == []


def test_what_time_alone_changes_next_is_known() -> None:
    plane, expert, [server] = ready_group()
    renew_all(plane, 5.0, expert, server)

    moments = []
    now_s = 5.0
    while (then_s := plane.next_change_s(now_s)) is not None and len(moments) < 9:
        moments.append(now_s := then_s)
        plane.update(now_s)

    settled, late, gone = TTL_S, 5.0 + TTL_S, 5.0 + GONE_S
    assert moments == [settled, late, gone, gone + HOLD_S, 600.0, gone + 600.0]
    assert members(plane) == {}


def test_what_time_changed_since_the_last_decision_is_still_due() -> None:
    plane, _, _ = ready_group()
    plane.update(TTL_S - 0.0001)  # by a timer that fires early

    due_s = plane.next_change_s(TTL_S + 0.001)

    assert due_s == TTL_S


def test_a_renewal_that_says_nothing_new_decides_nothing_anew() -> None:
    plane, expert, [server] = ready_group()
    before = plane.groups.views["group-1"]

    server.says(load=load_of(num_running=7, free_kv_tokens=1)).renew(plane, 1.0)

    assert plane.groups.views["group-1"] is before
    entry = plane.registry.get("attn-0")
    assert entry is not None and entry.report.load.num_running == 7
