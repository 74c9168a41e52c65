from __future__ import annotations

import pytest
from router_api import ServedApi, serving
from router_servers import attn, mlp

from sgl_router_afd.control.standing import GroupState
from sglang_afd.config import Role

DRAIN = "/afd/v1/servers/attn-0/drain"
DRAIN_GROUP = "/afd/v1/groups/group-1/drain"


def joined(api: ServedApi) -> None:
    expert = mlp("mlp-0")
    api.join(expert, attn("attn-0").attach(expert), attn("attn-1").attach(expert))


def test_a_server_that_is_asked_to_drain_gets_no_new_requests_from_any_relay() -> None:
    with serving() as api:
        joined(api)
        reply = api.ask("POST", DRAIN, {"reason": "new kernel"})
        row = api.row("attn-0")

    assert reply.json == {"name": "attn-0", "is_draining": True, "reason": "new kernel"}
    assert (row.state, row.reason) == ("draining", "new kernel")


def test_a_drain_needs_no_body() -> None:
    with serving() as api:
        joined(api)
        reply = api.ask("POST", DRAIN)

    assert (reply.status, reply.json["reason"]) == (200, "an operator asked for it")


def test_a_drain_is_taken_back() -> None:
    with serving() as api:
        joined(api)
        api.ask("POST", DRAIN)
        reply = api.ask("DELETE", DRAIN)
        row = api.row("attn-0")

    assert reply.json == {"name": "attn-0", "is_draining": False, "reason": ""}
    assert row.state == "serving"


def test_that_a_server_ends_by_itself_cannot_be_taken_back() -> None:
    with serving() as api:
        expert = mlp("mlp-0")
        api.join(expert, attn("attn-0").attach(expert).says(is_draining=True))
        reply = api.ask("DELETE", DRAIN)

    assert reply.json["is_draining"] is True
    assert reply.json["reason"] == "it was asked to end"


def test_a_group_drains_and_comes_back() -> None:
    with serving() as api:
        joined(api)
        drained = api.ask("POST", DRAIN_GROUP, {"reason": "move"})
        during = api.plane.groups.views["group-1"].stand.state
        back = api.ask("DELETE", DRAIN_GROUP)
        after = api.plane.groups.views["group-1"].stand.state

    assert drained.json == {"name": "group-1", "is_draining": True, "reason": "move"}
    assert back.json["is_draining"] is False
    assert (during, after) == (GroupState.DRAINING, GroupState.READY)


def test_whoever_shows_the_attention_servers_of_a_drained_group_says_that_they_drain() -> None:
    with serving() as api:
        joined(api)
        api.ask("POST", DRAIN_GROUP, {"reason": "move"})
        (group,) = api.ask("GET", "/afd/v1/groups").json["groups"]
        listed = api.ask("GET", "/afd/v1/servers").json["servers"]
        workers = api.ask("GET", "/workers").json["workers"]
        row = api.row("attn-0")

    drains = ("draining", "group-1 drains: move")
    assert [(one["standing"], one["reason"]) for one in group["attn"]] == [drains] * 2
    assert [one["standing"] for one in listed] == ["draining"] * 3
    assert [one["metadata"]["afd_standing"] for one in workers] == ["draining"] * 3
    assert not any(one["is_healthy"] for one in workers)
    assert (row.state, row.reason) == drains


def test_a_server_whose_group_drains_is_told_so_by_an_answer_about_itself() -> None:
    with serving() as api:
        joined(api)
        api.ask("POST", DRAIN_GROUP, {"reason": "move"})
        reply = api.ask("DELETE", DRAIN)

    assert reply.json == {
        "name": "attn-0",
        "is_draining": True,
        "reason": "group-1 drains: move",
    }


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("POST", "/afd/v1/servers/nobody/drain", "no server 'nobody'"),
        ("DELETE", "/afd/v1/servers/nobody/drain", "no server 'nobody'"),
        ("DELETE", "/afd/v1/servers/nobody", "no server 'nobody'"),
        ("POST", "/afd/v1/groups/nobody/drain", "no group 'nobody'"),
        ("DELETE", "/afd/v1/groups/nobody/drain", "no group 'nobody'"),
    ],
)
def test_what_is_not_there_is_404(method: str, path: str, wanted: str) -> None:
    with serving() as api:
        reply = api.ask(method, path)

    assert reply.status == 404
    assert wanted in reply.error


@pytest.mark.parametrize("body", [b"{", b'{"reason": ""}', b'{"reasn": "x"}', b'{"reason": 5}'])
def test_a_drain_with_a_bad_body_is_400_and_changes_nothing(body: bytes) -> None:
    with serving() as api:
        joined(api)
        reply = api.ask("POST", DRAIN, body)
        row = api.row("attn-0")

    assert (reply.status, row.state) == (400, "serving")


def test_a_drain_with_an_endless_body_is_413() -> None:
    with serving() as api:
        joined(api)
        reply = api.ask("POST", DRAIN, b" " * 20_000)

    assert reply.status == 413


def test_a_server_is_removed() -> None:
    with serving() as api:
        joined(api)
        reply = api.ask("DELETE", "/afd/v1/servers/attn-0")
        known = api.plane.registry.get("attn-0")
        api.publish()

    assert (reply.json, known) == ({"server_id": "attn-0"}, None)
    assert [row.server_id for row in api.tables[-1].rows] == ["attn-1"]


def test_a_removed_server_that_the_router_asks_is_asked_no_more() -> None:
    with serving() as api:
        server = attn("attn-0")
        api.fleet.add_static("http://attn-0:30000", Role.ATTN)
        (static,) = api.fleet.static.all()
        api.fleet.static.on_answer(static, 200, encoded(server))
        assert api.fleet.is_static("attn-0")

        api.ask("DELETE", "/afd/v1/servers/attn-0")

        assert api.fleet.statics() == ()
        assert api.plane.registry.get("attn-0") is None


def encoded(server: object) -> bytes:
    from sglang_afd.protocol.registration import encode

    return encode(server.registration)  # type: ignore[attr-defined]
