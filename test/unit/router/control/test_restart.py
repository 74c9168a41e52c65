from __future__ import annotations

import random

import pytest
from router_servers import TTL_S, FakeServer, a_plane, attn, mlp, pass_probes, register_all, told

from sgl_router_afd.control.persist import Saved
from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.ratio import Ratio


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


def test_names_of_groups_that_did_not_come_back_are_not_given_to_new_ones() -> None:
    plane = a_plane(Saved(groups={"group-1": 7}))

    lease = mlp("mlp-0").register(plane, 0.0)

    assert (lease.group, lease.epoch) == ("group-2", 1)
