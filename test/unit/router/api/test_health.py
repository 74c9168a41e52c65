from __future__ import annotations

from router_api import serving
from router_servers import attn, mlp

from sglang_afd.config import Role


def test_a_router_without_servers_lives_and_is_not_ready() -> None:
    with serving() as api:
        health, readiness = api.ask("GET", "/health"), api.ask("GET", "/readiness")

    assert (health.status, health.json) == (
        200,
        {"status": "ok", "num_ready": 0, "num_servers": 0},
    )
    assert readiness.status == 503
    assert "--afd-router" in readiness.error


def test_a_router_with_a_ready_group_is_ready() -> None:
    with serving() as api:
        expert = mlp("mlp-0")
        api.join(expert, attn("attn-0").attach(expert))
        health, readiness = api.ask("GET", "/health"), api.ask("GET", "/readiness")

    assert health.json == {"status": "ok", "num_ready": 1, "num_servers": 1}
    assert readiness.json == {
        "status": "ready",
        "groups": [
            {"name": "group-1", "state": "ready", "reason": "1 of 1 attention servers serve"}
        ],
        "trouble": "",
    }


def test_a_router_that_is_not_ready_says_what_everybody_lacks() -> None:
    with serving() as api:
        api.join(mlp("mlp-0", 0, 2), mlp("spare-0", shard=None, exchange_address=""))
        api.fleet.add_static("http://nobody:1", Role.ATTN)
        readiness = api.ask("GET", "/readiness")

    assert readiness.status == 503
    for reason in (
        "group-1 is forming: of its 2 MLP servers rank 1",
        "spare-0 is in no group: a spare",
        "http://nobody:1 was not heard of: not asked yet",
    ):
        assert reason in readiness.error


def test_a_router_that_cannot_save_its_epochs_says_so() -> None:
    with serving() as api:
        api.plane.trouble = "--state-file /x cannot be written: No space left on device"
        readiness = api.ask("GET", "/readiness")

    assert "groups stay as they are: --state-file /x cannot be written" in readiness.error


def test_a_ready_router_that_cannot_save_its_epochs_says_so() -> None:
    with serving() as api:
        expert = mlp("mlp-0")
        api.join(expert, attn("attn-0").attach(expert))
        api.plane.trouble = "--state-file /x cannot be written: No space left on device"
        readiness = api.ask("GET", "/readiness")

    assert readiness.status == 200
    assert readiness.json["trouble"] == api.plane.trouble


def test_reasons_have_a_bound() -> None:
    with serving() as api:
        for index in range(20):
            api.fleet.add_static(f"http://nobody-{index}:1", Role.ATTN)
        readiness = api.ask("GET", "/readiness")

    assert readiness.error.count("not asked yet") == 8
    assert "and 12 more" in readiness.error
