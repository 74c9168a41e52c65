from __future__ import annotations

from router_api import ServedApi, serving
from router_servers import EXPERTS, FINGERPRINT, FakeServer, attn, mlp

from sglang_afd import __version__
from sglang_afd.config import Role
from sglang_afd.protocol.registration import Load, PeerLoss


def a_ready_group(api: ServedApi) -> tuple[FakeServer, FakeServer]:
    expert = mlp("mlp-0")
    server = attn("attn-0").attach(expert)
    api.join(expert, server)
    return expert, server


def test_the_picture_of_a_ready_group_has_the_shape_that_others_build_on() -> None:
    with serving(ratio="7:1", policy="round_robin") as api:
        _, server = a_ready_group(api)
        load = Load(
            num_running=1,
            num_waiting=2,
            free_kv_tokens=9000,
            tokens_per_s=12.5,
            expert_imbalance=0,
        )
        server.says(load=load).renew(api.plane, 0.5)
        api.now_s = 2.0
        api.count("attn-0", in_flight=3, served=10, failed=1)

        picture = api.ask("GET", "/afd/v1/groups").json

    events = picture.pop("events")
    assert picture == {
        "version": 1,
        "router": {
            "boot_id": "router",
            "package_version": __version__,
            "up_s": 2.0,
            "policy": "round_robin",
            "data_plane": "relay",
            "ratio": "7:1",
            "num_requests_in_flight": 3,
            "num_requests_waiting": 0,
        },
        "groups": [
            {
                "name": "group-1",
                "state": "ready",
                "reason": "1 of 1 attention servers serve",
                "epoch": 2,
                "models": ["tiny"],
                "fingerprint": FINGERPRINT,
                "attn": [
                    {
                        "server_id": "attn-0",
                        "boot_id": "attn-0.boot-1",
                        "role": "attn",
                        "url": "http://attn-0:30000",
                        "standing": "serving",
                        "reason": "",
                        "is_static": False,
                        "last_heard_ago_s": 1.5,
                        "models": ["tiny"],
                        "shard": None,
                        "attached": ["mlp-0"],
                        "lost": [],
                        "capacity": {"max_running_requests": 64, "kv_tokens": 10_000},
                        "load": {
                            "num_running": 1,
                            "num_waiting": 2,
                            "free_kv_tokens": 9000,
                            "tokens_per_s": 12.5,
                            "expert_imbalance": 0.0,
                        },
                        "num_in_flight": 3,
                        "num_served": 10,
                        "num_failed": 1,
                        "ttft_ms": None,
                    }
                ],
                "mlp": [
                    {
                        "server_id": "mlp-0",
                        "boot_id": "mlp-0.boot-1",
                        "role": "mlp",
                        "url": "http://mlp-0:30000",
                        "standing": "serving",
                        "reason": "",
                        "is_static": False,
                        "last_heard_ago_s": 2.0,
                        "models": [],
                        "shard": {
                            "ep_rank": 0,
                            "ep_size": 1,
                            "first_expert": 0,
                            "stop_expert": EXPERTS,
                        },
                        "attached": [],
                        "lost": [],
                        "capacity": {"max_running_requests": 64, "kv_tokens": 10_000},
                        "load": picture["groups"][0]["mlp"][0]["load"],
                        "num_in_flight": 0,
                        "num_served": 0,
                        "num_failed": 0,
                        "ttft_ms": None,
                    }
                ],
            }
        ],
        "unplaced": [],
        "unheard": [],
    }
    assert events[-1] == {
        "ago_s": 2.0,
        "text": "mlp-0 registered, MLP rank 0 of 1 at http://mlp-0:30000",
    }


def test_events_come_newest_first() -> None:
    with serving() as api:
        api.join(mlp("mlp-0"))
        api.now_s = 3.0
        api.plane.drain("mlp-0", "somebody asked", 3.0)

        events = api.ask("GET", "/afd/v1/groups").json["events"]

    ages = [event["ago_s"] for event in events]
    assert ages == sorted(ages) and ages[0] == 0.0
    assert "mlp-0 drains: somebody asked" in [
        event["text"] for event in events if not event["ago_s"]
    ]


def test_a_server_without_a_group_is_unplaced_and_the_reason_says_why() -> None:
    with serving() as api:
        api.join(mlp("spare-0", shard=None, exchange_address=""))

        picture = api.ask("GET", "/afd/v1/groups").json

    (spare,) = picture["unplaced"]
    assert (spare["server_id"], spare["standing"], spare["shard"]) == ("spare-0", "unplaced", None)
    assert "a spare" in spare["reason"]


def test_lost_peers_have_their_names_and_unknown_ones_their_boot_ids() -> None:
    with serving() as api:
        expert, server = a_ready_group(api)
        losses = (
            PeerLoss(boot_id=expert.boot_id, reason="silent"),
            PeerLoss(boot_id="gone.boot-1", reason="ended"),
        )
        server.says(lost=losses, attached=(expert.boot_id, "stranger.boot-1"))
        server.renew(api.plane, 0.0)

        group = api.ask("GET", "/afd/v1/groups").json["groups"][0]

    (shown,) = group["attn"]
    assert shown["lost"] == [
        {"peer": "mlp-0", "reason": "silent"},
        {"peer": "gone.boot-1", "reason": "ended"},
    ]
    assert shown["attached"] == ["mlp-0", "stranger.boot-1"]


def test_addresses_at_which_nobody_answered_are_shown_with_the_reason() -> None:
    with serving() as api:
        api.fleet.add_static("http://nobody:1", Role.ATTN)

        unheard = api.ask("GET", "/afd/v1/groups").json["unheard"]

    assert unheard == [{"url": "http://nobody:1", "reason": "not asked yet"}]


def test_the_list_of_servers_says_where_each_belongs() -> None:
    with serving() as api:
        a_ready_group(api)
        api.join(mlp("spare-0", shard=None, exchange_address=""))

        answer = api.ask("GET", "/afd/v1/servers").json

    places = [(one["server_id"], one["group"], one["epoch"]) for one in answer["servers"]]
    assert places == [("mlp-0", "group-1", 2), ("attn-0", "group-1", 2), ("spare-0", "", 0)]


def test_one_server_is_shown_and_an_unknown_one_is_404() -> None:
    with serving() as api:
        a_ready_group(api)

        known, unknown = (api.ask("GET", f"/afd/v1/servers/{one}") for one in ("mlp-0", "mlp-9"))

    assert (known.status, known.json["url"]) == (200, "http://mlp-0:30000")
    assert unknown.status == 404
    assert "'mlp-9'" in unknown.error and "GET /afd/v1/servers" in unknown.error
