from __future__ import annotations

from urllib.parse import quote

import pytest
from router_api import ServedApi, serving
from router_servers import attn, mlp

from sgl_router_afd.api.workers import MAX_ASKED, worker_id
from sglang_afd.config import Role
from sglang_afd.protocol.registration import encode

URL = "http://new:30000"


def joined(api: ServedApi) -> None:
    expert = mlp("mlp-0")
    api.join(expert, attn("attn-0").attach(expert))


def test_workers_are_listed_in_the_shape_of_the_gateway() -> None:
    with serving() as api:
        joined(api)
        api.count("attn-0", in_flight=2)
        answer = api.ask("GET", "/workers").json

    assert answer["total"] == 2
    assert answer["stats"] == {
        "regular_count": 1,
        "prefill_count": 0,
        "decode_count": 0,
        "mlp_count": 1,
    }
    assert answer["workers"][1] == {
        "id": worker_id("http://attn-0:30000"),
        "url": "http://attn-0:30000",
        "model_id": "tiny",
        "priority": 50,
        "cost": 1.0,
        "worker_type": "regular",
        "is_healthy": True,
        "load": 2,
        "connection_mode": "Http",
        "metadata": {
            "afd_server_id": "attn-0",
            "afd_group": "group-1",
            "afd_epoch": "2",
            "afd_standing": "serving",
            "afd_reason": "",
        },
        "job_status": None,
    }
    assert answer["workers"][0]["worker_type"] == "mlp"


@pytest.mark.parametrize(
    ("worker_type", "role"), [("regular", Role.ATTN), ("attn", Role.ATTN), ("mlp", Role.MLP)]
)
def test_a_worker_that_is_added_is_asked_by_the_router(worker_type: str, role: Role) -> None:
    with serving() as api:
        reply = api.ask("POST", "/workers", {"url": URL + "/", "worker_type": worker_type})
        statics = api.fleet.statics()

    assert statics == ((URL, role),)
    assert (reply.status, reply.headers["Location"]) == (202, f"/workers/{worker_id(URL)}")
    assert (reply.json["status"], reply.json["url"]) == ("accepted", URL)


def test_a_worker_is_an_attention_server_unless_it_says_otherwise() -> None:
    with serving() as api:
        api.ask("POST", "/workers", {"url": URL})
        statics = api.fleet.statics()

    assert statics == ((URL, Role.ATTN),)


def test_a_worker_that_has_not_answered_is_pending_and_keeps_its_id_when_it_does() -> None:
    with serving() as api:
        path = api.ask("POST", "/workers", {"url": URL}).json["location"]
        before = api.ask("GET", path).json
        (static,) = api.fleet.static.all()
        api.fleet.static.on_answer(static, 200, encode(attn("new").registration))
        after = api.ask("GET", path).json

    assert (before["is_healthy"], before["job_status"]["status"]) == (False, "pending")
    assert before["job_status"]["message"] == "not asked yet"
    assert (after["metadata"]["afd_server_id"], after["job_status"]) == ("new", None)


def test_an_mlp_worker_never_gets_a_request() -> None:
    with serving() as api:
        api.ask("POST", "/workers", {"url": "http://mlp-0:30000", "worker_type": "mlp"})
        (static,) = api.fleet.static.all()
        api.fleet.static.on_answer(static, 200, encode(mlp("mlp-0").registration))
        api.publish()
        decision = api.ask("GET", "/afd/v1/route")
        worker = api.ask("GET", f"/workers/{worker_id('http://mlp-0:30000')}").json

    assert (worker["is_healthy"], worker["worker_type"]) == (True, "mlp")
    assert decision.status == 503
    assert all(table.rows == () for table in api.tables)


def test_adding_a_worker_twice_is_accepted_and_adds_one() -> None:
    with serving() as api:
        replies = [api.ask("POST", "/workers", {"url": URL}) for _ in range(2)]
        statics = api.fleet.statics()

    assert [reply.status for reply in replies] == [202, 202]
    assert len(statics) == 1


def test_the_role_of_a_worker_does_not_change() -> None:
    with serving() as api:
        joined(api)
        registered = api.ask("POST", "/workers", {"url": "http://mlp-0:30000"})
        api.ask("POST", "/workers", {"url": URL})
        static = api.ask("POST", "/workers", {"url": URL, "worker_type": "mlp"})

    assert (registered.status, static.status) == (409, 409)
    assert "worker_type mlp; DELETE it first" in registered.error


def test_what_the_gateway_knows_and_this_router_does_not_is_accepted_and_named() -> None:
    with serving() as api:
        reply = api.ask("POST", "/workers", {"url": URL, "priority": 9, "model_id": "m"})

    assert reply.status == 202
    assert "without effect here: model_id, priority" in reply.json["message"]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"url": URL, "worker_type": "prefill"}, "worker_type 'prefill' is not known here"),
        ({"url": "new:30000"}, "is no http://host:port"),
        ({"url": "http://new"}, "is no http://host:port"),
        ({"url": "http://user:word@new:1"}, "is no http://host:port"),
        ({"url": "http://new:1/path"}, "is no http://host:port"),
        ({"url": "http://n..ew:1"}, "is no http://host:port"),
        ({"url": "http://new:65536"}, "is no http://host:port"),
        ({}, "missing required field `url`"),
        ({"url": URL, "api_key": "sk-secret"}, "unknown field `api_key`"),
    ],
)
def test_a_worker_that_cannot_be_is_400(body: dict[str, str], wanted: str) -> None:
    with serving() as api:
        reply = api.ask("POST", "/workers", body)
        statics = api.fleet.statics()

    assert (reply.status, statics) == (400, ())
    assert wanted in reply.error
    assert "sk-secret" not in reply.error


def test_a_static_worker_that_is_deleted_is_asked_no_more() -> None:
    with serving() as api:
        path = api.ask("POST", "/workers", {"url": URL}).json["location"]
        (static,) = api.fleet.static.all()
        api.fleet.static.on_answer(static, 200, encode(attn("new").registration))
        reply = api.ask("DELETE", path)
        left = (api.fleet.statics(), len(api.plane.registry))

    assert (reply.status, left) == (202, ((), 0))


def test_a_worker_that_registered_itself_drains_when_it_is_deleted() -> None:
    with serving() as api:
        joined(api)
        reply = api.ask("DELETE", f"/workers/{worker_id('http://attn-0:30000')}")
        row = api.row("attn-0")

    assert reply.status == 202
    assert "drains" in reply.json["message"]
    assert row.state == "draining"


@pytest.mark.parametrize("name", ["attn-0", quote("http://attn-0:30000", safe="")])
def test_a_worker_is_found_by_its_server_id_and_by_its_address(name: str) -> None:
    with serving() as api:
        joined(api)
        reply = api.ask("GET", f"/workers/{name}")

    assert reply.json["url"] == "http://attn-0:30000"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_unknown_worker_is_404(method: str) -> None:
    with serving() as api:
        reply = api.ask(method, "/workers/nobody")

    assert reply.status == 404
    assert "'nobody'" in reply.error


def test_the_addresses_that_a_router_asks_are_bounded() -> None:
    with serving() as api:
        for number in range(MAX_ASKED - 1):
            api.fleet.add_static(f"http://old-{number}:1", Role.ATTN)
        replies = [api.ask("POST", "/workers", {"url": url}) for url in (URL, URL, "http://b:1")]
        num_asked = len(api.fleet.statics())

    assert [reply.status for reply in replies] == [202, 202, 409]
    assert num_asked == MAX_ASKED and "DELETE some of them" in replies[-1].error


def test_a_worker_that_drains_since_it_was_deleted_serves_when_it_is_added_again() -> None:
    with serving() as api:
        joined(api)
        api.ask("DELETE", "/workers/attn-0")
        deleted = api.row("attn-0").state
        api.ask("POST", "/workers", {"url": "http://attn-0:30000"})
        added = api.row("attn-0").state

    assert (deleted, added) == ("draining", "serving")
