from __future__ import annotations

import json

import msgspec
import pytest
from router_api import WALL_S, ServedApi, serving
from router_servers import FakeServer, attn, mlp

from sglang_afd.protocol.registration import (
    MAX_MESSAGE_BYTES,
    Lease,
    decode_from_router,
    encode,
)
from sglang_afd.protocol.signature import SIGNATURE_HEADER, sign

SECRET = "a secret of more than 16 bytes"


def now(server: FakeServer, sent_at_s: float = WALL_S) -> FakeServer:
    server.registration = msgspec.structs.replace(server.registration, sent_at_s=sent_at_s)
    return server


def signed(body: bytes, secret: str = SECRET) -> dict[str, str]:
    return {SIGNATURE_HEADER: sign(secret.encode(), body)}


def lease_of(body: bytes) -> Lease:
    lease = decode_from_router(body)
    assert isinstance(lease, Lease)
    return lease


def registered(api: ServedApi, server: FakeServer) -> FakeServer:
    server.lease = lease_of(api.send(server.registration).body)
    return server


def test_a_server_registers_renews_its_lease_and_leaves() -> None:
    with serving() as api:
        server = registered(api, mlp("mlp-0"))
        renewed = api.send(server.renewal())
        left = api.send(server.leaving())
        known = api.plane.registry.get("mlp-0")

    assert server.lease is not None and server.lease.group == "group-1"
    assert (renewed.status, lease_of(renewed.body).lease_id) == (200, server.lease.lease_id)
    assert (left.status, left.body, known) == (204, b"", None)


def test_relay_processes_hear_of_a_server_that_registered() -> None:
    with serving() as api:
        api.send(attn("attn-0").registration)

        row = api.row("attn-0")

    assert (row.url, row.state) == ("http://attn-0:30000", "unplaced")


def test_a_lease_that_is_not_known_is_declined_with_409() -> None:
    with serving() as api:
        reply = api.send(mlp("mlp-0").renewal())

    assert reply.status == 409
    assert reply.json["type"] == "decline" and reply.json["code"] == "unknown_lease"
    assert "register again" in reply.json["message"]


def test_another_version_is_declined_before_its_fields_are_read() -> None:
    with serving() as api:
        reply = api.ask("POST", "/afd/v1/servers", {"type": "register", "version": 99, "new": 1})

    assert (reply.status, reply.json["code"]) == (409, "version")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"type":"lease"}', b"\xff", b'{"a":' * 2000])
def test_what_is_no_message_is_refused_with_400(body: bytes) -> None:
    with serving() as api:
        reply = api.ask("POST", "/afd/v1/servers", body)

    assert reply.status == 400
    assert "not a message of an sglang-afd server" in reply.error


def test_a_message_beyond_the_bound_is_refused_with_413() -> None:
    with serving() as api:
        reply = api.ask("POST", "/afd/v1/servers", b" " * (MAX_MESSAGE_BYTES + 1))

    assert reply.status == 413
    assert str(MAX_MESSAGE_BYTES) in reply.error


def test_a_signed_message_of_now_is_taken() -> None:
    with serving(secret=SECRET) as api:
        message = now(mlp("mlp-0")).registration
        reply = api.send(message, headers=signed(encode(message)))

    assert reply.status == 200


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, "has no X-AFD-Signature"),
        (signed(b"another body"), "another secret, or the message was changed"),
        (signed(encode(now(mlp("mlp-0")).registration), "x" * 16), "another secret"),
        ({SIGNATURE_HEADER: ""}, "another secret"),
    ],
)
def test_a_message_without_the_right_signature_changes_nothing(
    headers: dict[str, str], wanted: str
) -> None:
    with serving(secret=SECRET) as api:
        reply = api.send(now(mlp("mlp-0")).registration, headers=headers)
        known = len(api.plane.registry)

    assert (reply.status, known) == (403, 0)
    assert wanted in reply.error and "--afd-secret-file" in reply.error
    assert SECRET not in reply.error


@pytest.mark.parametrize(("late_s", "status"), [(59, 200), (61, 403), (-59, 200), (-61, 403)])
def test_a_signed_message_may_be_60_s_off(late_s: float, status: int) -> None:
    with serving(secret=SECRET) as api:
        message = now(mlp("mlp-0"), WALL_S - late_s).registration
        reply = api.send(message, headers=signed(encode(message)))

    assert reply.status == status
    if status == 403:
        assert "set the clocks of both hosts" in reply.error


def test_without_a_secret_nobody_registers_with_a_router_that_others_can_reach() -> None:
    with serving(host="0.0.0.0") as api:
        refused = api.send(attn("attn-0").registration)

    assert refused.status == 403
    assert "--afd-secret-file" in refused.error and "--attn and --mlp" in refused.error
    assert api.plane.registry.get("attn-0") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_without_a_secret_servers_register_with_a_router_on_loopback(host: str) -> None:
    with serving(host=host) as api:
        taken = api.send(attn("attn-0").registration)

    assert taken.status == 200


def test_with_a_secret_the_routers_address_does_not_matter() -> None:
    with serving(host="0.0.0.0", secret=SECRET) as api:
        body = encode(now(attn("attn-0")).registration)
        taken = api.ask("POST", "/afd/v1/servers", body, headers=signed(body))

    assert taken.status == 200


def test_without_a_secret_clocks_do_not_matter() -> None:
    with serving() as api:
        reply = api.send(now(mlp("mlp-0"), 5.0).registration)

    assert reply.status == 200


def test_a_page_of_another_site_cannot_register_a_server_where_no_secret_is_asked_for() -> None:
    with serving() as api:
        message = mlp("mlp-0").registration
        reply = api.send(message, headers={"Origin": "http://elsewhere.example"})

    assert reply.status == 403
    assert "http://elsewhere.example" in reply.error


def test_the_answer_to_a_message_is_what_servers_read() -> None:
    with serving() as api:
        reply = api.send(mlp("mlp-0").registration)

    assert reply.headers["Content-Type"] == "application/json"
    assert json.loads(reply.body)["type"] == "lease"


def test_a_registration_that_is_played_back_after_the_goodbye_is_declined() -> None:
    with serving(secret=SECRET) as api:
        server = now(mlp("mlp-0"))
        body = encode(server.registration)
        server.lease = lease_of(api.ask("POST", "/afd/v1/servers", body, headers=signed(body)).body)
        goodbye = encode(msgspec.structs.replace(server.leaving(), sent_at_s=WALL_S + 1))
        left = api.ask("POST", "/afd/v1/servers", goodbye, headers=signed(goodbye))
        api.now_s, api.wall_s = 59.0, WALL_S + 59
        again = api.ask("POST", "/afd/v1/servers", body, headers=signed(body))
        known = len(api.plane.registry)

    assert (left.status, again.status, known) == (204, 409, 0)
    assert again.json["code"] == "unknown_lease"
    assert "mlp-0 said goodbye since it sent this" in again.json["message"]


def test_messages_that_are_played_back_change_nothing() -> None:
    with serving(secret=SECRET) as api:
        server = now(mlp("mlp-0").says(seq=7))
        server.registration = msgspec.structs.replace(server.registration, report=server.report)
        body = encode(server.registration)
        server.lease = lease_of(api.ask("POST", "/afd/v1/servers", body, headers=signed(body)).body)
        again = api.ask("POST", "/afd/v1/servers", body, headers=signed(body))
        renewal = encode(msgspec.structs.replace(server.renewal(), sent_at_s=WALL_S))
        renewed = api.ask("POST", "/afd/v1/servers", renewal, headers=signed(renewal))

    assert (again.status, again.json["code"]) == (409, "unknown_lease")
    assert lease_of(renewed.body).lease_id == server.lease.lease_id
