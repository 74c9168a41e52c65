from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from router_servers import (
    OTHER,
    TTL_S,
    FakeServer,
    a_plane,
    attn,
    mlp,
    pass_probes,
    register_all,
    told,
)

from sgl_router_afd.control import persist
from sgl_router_afd.control.departed import KEEP_S
from sgl_router_afd.control.ledger import Ledger
from sgl_router_afd.control.persist import Saved
from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.ratio import Ratio
from sgl_router_afd.control.routing import Candidates, Hold
from sgl_router_afd.control.standing import Standing
from sglang_afd.errors import ConfigError, Refused
from sglang_afd.protocol.registration import Condition, DeclineCode, Registration


def picture(plane: ControlPlane) -> dict[str, tuple[object, ...]]:
    return {
        name: (
            view.epoch,
            view.stand,
            dict(sorted(view.stands.items())),
            sorted(entry.server_id for entry in view.with_traffic()),
        )
        for name, view in plane.groups.views.items()
    }


def two_groups(saved: list[Saved]) -> tuple[ControlPlane, list[FakeServer]]:
    """Two groups of two ranks, three and two attention servers, all READY; two epochs behind."""
    plane = a_plane(ratio=Ratio(num_attn=3, num_mlp=2), saved=saved)
    experts = [mlp(f"mlp-{i}", i % 2, 2) for i in range(4)]
    servers = [attn(f"attn-{i}") for i in range(5)]
    register_all(plane, 0.0, *experts, *servers)
    for server in servers:
        view = plane.groups.of(server.id)
        assert view is not None
        server.attach(*(e for e in experts if e.id in view.stands))
    for server in (*experts, *servers):
        server.renew(plane, 1.0)
    pass_probes(plane, 1.0)
    return plane, [*experts, *servers]


@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_after_all_have_registered_again_everything_is_as_before(seed: int, has_file: bool) -> None:
    saved: list[Saved] = []
    before, servers = two_groups(saved)
    random.Random(seed).shuffle(servers)
    last = saved[-1] if has_file else Saved()

    after = a_plane(last, Ratio(num_attn=3, num_mlp=2))
    for index, server in enumerate(servers):
        server.register(after, TTL_S * index / len(servers))
        pass_probes(after, TTL_S * index / len(servers))

    assert picture(after) == picture(before)


def test_a_server_that_has_a_group_is_not_put_into_another_before_all_could_register() -> None:
    saved: list[Saved] = []
    _, servers = two_groups(saved)
    mine = next(one for one in servers if one.id == "attn-4")
    others = [one for one in servers if one.id in ("mlp-0", "mlp-1")]
    after = a_plane(saved[-1])
    register_all(after, 0.0, *others)

    lease = mine.says(attached=()).register(after, 1.0)

    assert (lease.group, lease.mlp_urls) == ("", ())
    assert "waits for the MLP servers of group-2 to register again" in lease.reason


def test_a_server_whose_group_does_not_come_back_joins_another() -> None:
    saved: list[Saved] = []
    _, servers = two_groups(saved)
    mine = next(one for one in servers if one.id == "attn-4")
    others = [one for one in servers if one.id in ("mlp-0", "mlp-1")]
    after = a_plane(saved[-1])
    register_all(after, 0.0, *others)
    mine.says(attached=()).register(after, 1.0)

    after.update(TTL_S + 0.1)

    assert told(after, "attn-4").group == "group-1"


def test_a_member_that_an_earlier_router_did_not_know_changes_the_epoch() -> None:
    saved: list[Saved] = []
    before, servers = two_groups(saved)
    after = a_plane(saved[-1])
    register_all(after, 0.0, *servers)
    epochs = {name: view.epoch for name, view in after.groups.views.items()}

    attn("attn-9").register(after, 1.0)

    changed = {name for name, view in after.groups.views.items() if view.epoch == epochs[name] + 1}
    assert len(changed) == 1


def test_an_epoch_is_saved_before_a_server_hears_of_it() -> None:
    saved: list[Saved] = []
    plane = a_plane(saved=saved)

    lease = mlp("mlp-0").register(plane, 0.0)

    assert lease.epoch == 1
    assert saved[-1].groups == {"group-1": 1}


def restarted(path: Path, *servers: FakeServer, now_s: float = 0.0) -> ControlPlane:
    """A second router that reads the first one's file, when these have registered again."""
    ledger = Ledger(persist.load(path), partial(persist.save, path))
    plane = ControlPlane("router-2", ledger, started_s=0.0)
    register_all(plane, now_s, *servers)
    pass_probes(plane, now_s)
    return plane


def a_group(path: Path) -> tuple[ControlPlane, list[FakeServer]]:
    """One MLP and two attention servers, all serving, of a router with this state file."""
    expert = mlp("mlp-0")
    servers = [expert, *(attn(f"attn-{i}").attach(expert) for i in range(2))]
    return restarted(path, *servers), servers


def standings(plane: ControlPlane) -> dict[str, tuple[str, str]]:
    return {
        name: (str(stand.standing), stand.reason)
        for view in plane.groups.views.values()
        for name, stand in view.stands.items()
        if stand.standing is not Standing.SERVING
    }


def test_a_drain_of_a_server_outlives_the_router(tmp_path: Path) -> None:
    before, servers = a_group(tmp_path / "state")
    before.drain("attn-0", "new kernel", 1.0)

    after = restarted(tmp_path / "state", *servers)

    assert standings(after) == standings(before) == {"attn-0": ("draining", "new kernel")}
    assert told(after, "attn-0").is_draining


def test_a_drain_of_a_group_outlives_the_router(tmp_path: Path) -> None:
    before, servers = a_group(tmp_path / "state")
    before.drain_group("group-1", "move", 1.0)

    after = restarted(tmp_path / "state", *servers)

    assert after.groups.views["group-1"].stand == before.groups.views["group-1"].stand
    assert standings(after) == standings(before)
    assert set(standings(after)) == {"mlp-0", "attn-0", "attn-1"}


def test_a_drain_that_was_taken_back_is_not_there_after_a_restart(tmp_path: Path) -> None:
    before, servers = a_group(tmp_path / "state")
    for reason in ("move", ""):
        before.drain("attn-0", reason, 1.0)
        before.drain_group("group-1", reason, 1.0)

    after = restarted(tmp_path / "state", *servers)

    assert standings(after) == {}


def test_a_server_that_was_restarted_while_no_router_ran_is_drained_no_more(
    tmp_path: Path,
) -> None:
    before, (expert, server, other) = a_group(tmp_path / "state")
    before.drain("attn-0", "new kernel", 1.0)

    after = restarted(tmp_path / "state", expert, server.restarted("boot-2").attach(expert), other)

    assert standings(after) == {}
    assert persist.load(tmp_path / "state").drains == {}


def test_a_drain_goes_on_when_a_server_was_away_for_longer_than_its_lease(tmp_path: Path) -> None:
    plane, (expert, server, other) = a_group(tmp_path / "state")
    plane.drain("attn-0", "new kernel", 1.0)
    for now_s in (5.0, 10.0, 15.0):
        for one in (expert, other):
            one.renew(plane, now_s)
        plane.update(now_s)
    gone = plane.registry.get("attn-0")

    server.register(plane, 16.0)

    assert gone is None
    assert standings(plane) == {"attn-0": ("draining", "new kernel")}


def test_a_drain_is_in_force_though_it_cannot_be_saved_and_is_saved_as_soon_as_it_can() -> None:
    saved: list[Saved] = []
    is_full = False

    def save(now: Saved) -> None:
        if is_full:
            raise ConfigError("--state-file /x cannot be written: No space left on device")
        saved.append(now)

    plane = ControlPlane("router", Ledger(Saved(), save), started_s=0.0)
    expert = mlp("mlp-0")
    register_all(plane, 0.0, expert, attn("attn-0").attach(expert))
    pass_probes(plane, 0.0)
    is_full = True
    plane.drain("attn-0", "new kernel", 1.0)
    full = standings(plane), plane.trouble, plane.next_change_s(1.0)
    is_full = False

    plane.update(2.0)

    assert full[0] == {"attn-0": ("draining", "new kernel")}
    assert "No space left" in full[1] and full[2] == 2.0
    assert list(saved[-1].drains) == ["attn-0"] and plane.trouble == ""


class FullDisk:
    """A plane whose epochs cannot be saved, since somebody registered after the disk was full."""

    def __init__(self) -> None:
        self.is_full = False
        self.plane = ControlPlane("router", Ledger(Saved(), self.save), started_s=0.0)
        self.expert = mlp("mlp-0")
        self.servers = [attn(f"attn-{i}").attach(self.expert) for i in range(3)]
        register_all(self.plane, 0.0, self.expert, *self.servers)
        pass_probes(self.plane, 0.0)
        self.is_full = True
        register_all(self.plane, 0.5, attn("new").attach(self.expert))

    def save(self, now: Saved) -> None:
        if self.is_full:
            raise ConfigError("--state-file /x cannot be written: No space left on device")

    def serving(self) -> tuple[str, ...]:
        found = self.plane.route("tiny")
        return found.server_ids if isinstance(found, Candidates) else ()


def test_while_groups_stay_as_they_are_whoever_drains_stalls_or_is_late_gets_no_requests() -> None:
    world = FullDisk()
    drained, stalled, late = world.servers
    before = world.serving()

    world.plane.drain(drained.id, "new kernel", 1.0)
    stalled.says(condition=Condition.STALLED, reason="no peer", attached=())
    stalled.renew(world.plane, 1.0)
    after = world.serving()
    world.plane.update(TTL_S + 0.1)

    assert before == (drained.id, stalled.id, late.id)
    assert after == (late.id,)
    assert world.serving() == ()
    assert world.plane.trouble and world.plane.groups.views["group-1"].epoch == 4


def test_while_groups_stay_as_they_are_a_server_has_to_prove_itself_with_a_new_mlp_server() -> None:
    world = FullDisk()
    one, *_ = world.servers
    expert = world.expert.restarted("boot-2")
    expert.register(world.plane, 1.0)

    one.attach(expert).renew(world.plane, 1.0)
    unproved = world.serving()
    pass_probes(world.plane, 1.0)

    assert one.id not in unproved
    assert one.id in world.serving()


def test_while_groups_stay_as_they_are_who_comes_is_told_why_and_rank_0_not_to_ask_itself() -> None:
    world = FullDisk()
    expert = world.expert.restarted("boot-2")

    lease = expert.register(world.plane, 1.0)

    assert lease.mlp_urls == ()
    assert "cannot write its --state-file" in told(world.plane, "new").reason


def test_while_groups_stay_as_they_are_a_new_group_uses_up_one_name_and_one_epoch() -> None:
    world = FullDisk()
    mlp("mlp-9", fingerprint="cd" * 32).register(world.plane, 1.0)
    for now_s in range(2, 9):
        world.plane.update(now_s)
    world.is_full = False

    world.plane.update(9.0)

    lease = told(world.plane, "mlp-9")
    assert (lease.group, lease.epoch) == ("group-2", 1)


def test_what_was_saved_counts_though_the_first_decision_of_the_next_router_cannot_be() -> None:
    def save(now: Saved) -> None:
        if is_full:
            raise ConfigError("--state-file /x cannot be written: No space left on device")

    is_full = True
    last = Saved(
        groups={"group-1": 3, "group-2": 3},
        places={"mlp-0": "group-2", "mlp-1": "group-2"},
        group_drains={"group-2": "move"},
    )
    plane = ControlPlane("router", Ledger(last, save), started_s=0.0)
    ranks = [mlp(f"mlp-{rank}", rank, 2) for rank in range(2)]
    ranks[0].register(plane, 0.0)
    ranks[0].leave(plane, 1.0)
    register_all(plane, 2.0, *ranks)
    is_full = False

    plane.update(3.0)

    assert list(plane.groups.views) == ["group-2"]
    assert plane.groups.views["group-2"].stand.reason == "move"


def test_a_new_group_takes_no_name_of_before_though_it_was_used_in_vain_meanwhile() -> None:
    world = FullDisk()
    last = Saved(groups={"group-1": 3}, places={"mlp-0": "group-1"})
    plane = ControlPlane("router", Ledger(last, world.save), started_s=0.0)
    old = mlp("mlp-0")
    old.register(plane, 0.0)
    plane.leave(old.leaving(), 1.0)

    mlp("mlp-9").register(plane, 1.0)
    world.is_full = False
    plane.update(2.0)

    assert list(plane.groups.views) == ["group-2"]


def test_a_drain_of_a_group_goes_on_when_its_first_server_comes_and_leaves_again(
    tmp_path: Path,
) -> None:
    ranks = [mlp(f"mlp-{rank}", rank, 2) for rank in range(2)]
    server = attn("attn-0").attach(*ranks)
    restarted(tmp_path / "state", *ranks, server).drain_group("group-1", "move", 1.0)
    after = restarted(tmp_path / "state", ranks[0])

    ranks[0].leave(after, 1.0)
    register_all(after, 2.0, ranks[1], server, ranks[0].restarted("boot-2"))

    assert after.groups.views["group-1"].stand.reason == "move"
    assert set(standings(after)) == {"mlp-0", "mlp-1", "attn-0"}


def static_servers() -> list[FakeServer]:
    """Three groups of servers that hear nothing of the router: of each kind that there is."""
    wired = [attn(f"own-{i}", peer_urls=(f"http://elsewhere-{i}:1",)) for i in range(2)]
    for server in wired:
        server.says(condition=Condition.READY, attached=(f"{server.id}.mlp",))
    ranks = [mlp(f"mlp-{r}", r, 2, peer_urls=("http://mlp-0:30000",)) for r in range(2)]
    named = attn("attn-0", peer_urls=("http://mlp-0:30000",)).attach(*ranks)
    return [*wired, *ranks, named]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_restarted", [False, True])
def test_groups_of_servers_that_hear_nothing_of_the_router_keep_their_names(
    tmp_path: Path, seed: int, is_restarted: bool
) -> None:
    servers = static_servers()
    random.Random(seed).shuffle(servers)
    before = restarted(tmp_path / "state", *servers)
    names = {name: set(view.stands) for name, view in before.groups.views.items()}
    for server in servers:
        server.lease = None  # it was told of no group
    random.Random(seed + 100).shuffle(servers)
    again = [one.restarted(f"{one.id}.boot-2") for one in servers] if is_restarted else servers

    after = restarted(tmp_path / "state", *again)

    assert {name: set(view.stands) for name, view in after.groups.views.items()} == names
    assert len(names) == 3
    for name, view in after.groups.views.items():
        assert view.epoch > before.groups.views[name].epoch


def test_single_mlp_servers_that_hear_nothing_of_the_router_do_not_change_their_groups(
    tmp_path: Path,
) -> None:
    servers = [mlp("mlp-a"), mlp("mlp-b")]
    restarted(tmp_path / "state", *servers)

    again = [one.restarted(f"{one.id}.boot-2") for one in reversed(servers)]
    after = restarted(tmp_path / "state", *again)

    names = {name: set(view.stands) for name, view in after.groups.views.items()}
    assert names == {"group-1": {"mlp-a"}, "group-2": {"mlp-b"}}


def test_a_saved_place_counts_less_than_what_a_server_was_told_later() -> None:
    last = Saved(groups={"group-1": 3, "group-2": 3}, places={"mlp-0": "group-1"})
    plane = a_plane(last)
    server = mlp("mlp-0", group="group-2", epoch=4)

    plane.register(server.registration, 0.0)
    plane.update(0.0)

    assert told(plane, "mlp-0").group == "group-2"


def test_a_saved_place_counts_until_its_server_was_here_and_not_when_it_left_since() -> None:
    saved: list[Saved] = []
    _, servers = two_groups(saved)
    after = a_plane(saved[-1])
    register_all(after, 0.0, *servers)
    larger = [one for one in servers if told(after, one.id).group == "group-1"]
    smaller = [one for one in servers if told(after, one.id).group == "group-2"]
    mover = larger[-1]
    mover.leave(after, 1.0)
    smaller[-1].leave(after, 1.0)

    lease = mover.restarted("boot-2").says(condition=Condition.STARTING).register(after, 2.0)

    assert (len(larger), len(smaller)) == (5, 4)  # with their two ranks
    assert lease.group == "group-2"  # which has one attention server, where group-1 has two


def test_names_of_groups_that_did_not_come_back_are_not_given_to_new_ones() -> None:
    plane = a_plane(Saved(groups={"group-1": 7}))

    lease = mlp("mlp-0").register(plane, 0.0)

    assert (lease.group, lease.epoch) == ("group-2", 1)


def refusal(plane: ControlPlane, registration: Registration) -> str:
    """What is said against it."""
    with pytest.raises(Refused) as caught:
        plane.register(registration, 1.0)
    assert caught.value.code == DeclineCode.UNKNOWN_LEASE
    return str(caught.value)


def test_a_registration_that_is_played_back_to_the_next_router_brings_no_server_there(
    tmp_path: Path,
) -> None:
    before, (expert, server, other) = a_group(tmp_path / "state")
    captured = [one.registration for one in (expert, server, other)]
    server.leave(before, 1.0)
    other.renew(before, 1.0)
    after = restarted(tmp_path / "state")

    said = [refusal(after, one) for one in captured]

    assert ["said goodbye" in one for one in said] == [False, True, False]
    assert len(after.registry) == 0


def test_what_is_played_back_to_the_next_router_takes_no_drain_away(tmp_path: Path) -> None:
    before, (expert, old, other) = a_group(tmp_path / "state")
    captured = old.registration
    server = old.restarted("boot-2").attach(expert)
    server.register(before, 1.0)
    before.drain("attn-0", "new kernel", 2.0)
    after = restarted(tmp_path / "state", expert, other)

    refusal(after, captured)
    server.register(after, 1.0)

    assert standings(after) == {"attn-0": ("draining", "new kernel")}


def test_what_servers_said_is_in_the_file_only_as_long_as_it_can_be_played_back(
    tmp_path: Path,
) -> None:
    before, (expert, server, other) = a_group(tmp_path / "state")
    server.leave(before, 1.0)

    after = restarted(tmp_path / "state", expert)
    early = set(persist.load(tmp_path / "state").words)
    after.update(KEEP_S)

    assert early == {"mlp-0", "attn-0", "attn-1"}
    assert set(persist.load(tmp_path / "state").words) == {"mlp-0"}


def two_models_of_one_name(path: Path) -> list[FakeServer]:
    """Two MLP servers, the attention server that has the name and the one that is refused it."""
    experts = mlp("mlp-0"), mlp("mlp-1", fingerprint=OTHER)
    right = attn("attn-0", models=("tiny", "small")).attach(experts[0])
    wrong = attn("attn-1", fingerprint=OTHER).attach(experts[1])
    restarted(path, *experts, right, wrong)
    return [*experts, right, wrong]


def test_a_name_means_what_it_meant_before_the_restart_whoever_registers_first(
    tmp_path: Path,
) -> None:
    expert, other, right, wrong = two_models_of_one_name(tmp_path / "state")
    after = restarted(tmp_path / "state", other, wrong)
    early, why = after.route("tiny"), told(after, "attn-1").reason

    register_all(after, 1.0, expert, right)
    pass_probes(after, 1.0)

    assert isinstance(early, Hold) and "was served as 'tiny' before this router" in why
    assert after.route("tiny") == Candidates(server_ids=("attn-0",))


def test_a_name_is_free_for_another_model_when_its_servers_did_not_come_back(
    tmp_path: Path,
) -> None:
    _, other, _, wrong = two_models_of_one_name(tmp_path / "state")
    after = restarted(tmp_path / "state", other, wrong)
    for server in (other, wrong):
        server.renew(after, TTL_S - 1)

    after.update(TTL_S)
    pass_probes(after, TTL_S)

    assert after.route("tiny") == Candidates(server_ids=("attn-1",))
    assert persist.load(tmp_path / "state").models == {"tiny": OTHER}
