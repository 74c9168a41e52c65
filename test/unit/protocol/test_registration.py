from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from router_servers import attn, mlp

from sglang_afd.config import MAX_MLP_RANKS, MAX_PEERS
from sglang_afd.errors import ProtocolError, Refused
from sglang_afd.protocol.registration import (
    MAX_MESSAGE_BYTES,
    REGISTRATION_VERSION,
    AnyMessage,
    Decline,
    DeclineCode,
    FromRouter,
    Lease,
    Leave,
    Load,
    PeerLoss,
    Renewal,
    ToRouter,
    decode_from_router,
    decode_to_router,
    encode,
)

REPORT = (
    b'{"seq":3,"condition":"stalled","reason":"rank 1 is gone","attached":["m.b1"],'
    b'"lost":[{"boot_id":"m.b2","reason":"silent"}],'
    b'"load":{"num_running":2,"num_waiting":1,"free_kv_tokens":7,"tokens_per_s":12.5,'
    b'"expert_imbalance":1.5},"is_draining":false}'
)
SERVER = attn("attn-0").says(
    seq=3,
    condition="stalled",
    reason="rank 1 is gone",
    attached=("m.b1",),
    lost=(PeerLoss(boot_id="m.b2", reason="silent"),),
    load=Load(
        num_running=2,
        num_waiting=1,
        free_kv_tokens=7,
        tokens_per_s=12.5,
        expert_imbalance=1.5,
    ),
)
HEAD = {"version": 1, "server_id": "attn-0", "boot_id": "b1", "lease_id": "r-1"}
HEAD_BYTES = b'"version":1,"server_id":"attn-0","boot_id":"b1","lease_id":"r-1","sent_at_s":5.0'

# NOTE: a change here is a change of the wire; raise REGISTRATION_VERSION with it.
GOLDEN: list[tuple[AnyMessage, bytes]] = [
    (
        msgspec.structs.replace(mlp("mlp-1", 1, 2).registration, report=SERVER.report),
        b'{"type":"register","version":1,"server_id":"mlp-1","boot_id":"mlp-1.boot-1",'
        b'"started_at_s":1000.0,"sent_at_s":1000.0,"role":"mlp","models":[],"fingerprint":"'
        + b"ab"
        * 32
        + b'","num_experts":8,"url":"http://mlp-1:30000","exchange_address":"tcp://mlp-1:7000",'
        b'"shard":{"ep_rank":1,"ep_size":2,"first_expert":4,"stop_expert":8},"peer_urls":[],'
        b'"capacity":{"max_running_requests":64,"kv_tokens":10000},"group":"","epoch":0,'
        b'"report":' + REPORT + b"}",
    ),
    (
        Renewal(**HEAD, sent_at_s=5.0, report=SERVER.report),
        b'{"type":"renew",' + HEAD_BYTES + b',"report":' + REPORT + b"}",
    ),
    (Leave(**HEAD, sent_at_s=5.0), b'{"type":"leave",' + HEAD_BYTES + b"}"),
    (
        Lease(
            version=1,
            lease_id="r-1",
            ttl_s=6.0,
            renew_s=2.0,
            group="group-1",
            epoch=4,
            mlp_urls=("http://mlp-0:30000",),
            reason="",
            is_draining=False,
            may_stop=False,
        ),
        b'{"type":"lease","version":1,"lease_id":"r-1","ttl_s":6.0,"renew_s":2.0,'
        b'"group":"group-1","epoch":4,"mlp_urls":["http://mlp-0:30000"],"reason":"",'
        b'"is_draining":false,"may_stop":false}',
    ),
    (
        Decline(code=DeclineCode.REPLACED, message="no"),
        b'{"type":"decline","code":"replaced","message":"no"}',
    ),
]
NAMES = [type(message).__name__ for message, _ in GOLDEN]


def decode(message: AnyMessage, body: bytes) -> AnyMessage:
    if isinstance(message, ToRouter):
        return decode_to_router(body)
    return decode_from_router(body)


def registering(server: Any, **changes: object) -> bytes:
    fields = msgspec.to_builtins(server.registration)
    return msgspec.json.encode(fields | changes)


def test_every_message_stands_in_the_golden_table() -> None:
    every = {kind for union in (ToRouter, FromRouter) for kind in typing.get_args(union)}

    assert {type(message) for message, _ in GOLDEN} == every


def test_the_golden_bytes_are_those_of_this_version() -> None:
    assert REGISTRATION_VERSION == 1


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_a_message_is_written_as_its_golden_bytes(message: AnyMessage, body: bytes) -> None:
    assert encode(message) == body


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_golden_bytes_are_read_as_their_message(message: AnyMessage, body: bytes) -> None:
    assert decode(message, body) == message


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_every_truncation_is_refused(message: AnyMessage, body: bytes) -> None:
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            decode(message, body[:length])


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_an_unknown_field_is_refused(message: AnyMessage, body: bytes) -> None:
    with pytest.raises(ProtocolError, match="unknown field `more`"):
        decode(message, body[:-1] + b',"more":1}')


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_every_missing_field_is_refused(message: AnyMessage, body: bytes) -> None:
    fields = msgspec.json.decode(body)

    for name in fields:
        rest = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(ProtocolError):
            decode(message, msgspec.json.encode(rest))


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_a_message_of_the_other_direction_is_refused(message: AnyMessage, body: bytes) -> None:
    other = decode_from_router if isinstance(message, ToRouter) else decode_to_router

    with pytest.raises(ProtocolError, match="Invalid value"):
        other(body)


def test_another_version_is_refused_as_that_whatever_its_fields_are() -> None:
    with pytest.raises(Refused, match="version 2, this router speaks 1; install") as caught:
        decode_to_router(b'{"type":"register","version":2,"new_field":[1,2]}')

    assert caught.value.code == DeclineCode.VERSION


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("server_id", ""),
        ("server_id", "a b"),
        ("server_id", "a\n"),
        ("server_id", "a" * 65),
        ("boot_id", "a\n"),
        ("fingerprint", "AB" * 32),
        ("fingerprint", "ab" * 31),
        ("url", "ftp://host:1"),
        ("url", "http://host"),
        ("url", "http://user@host:1"),
        ("url", "http://host:1/path"),
        ("url", "http://host:1\n"),
        ("url", "http://ho..st:1"),
        ("url", "http://host:65536"),
        ("peer_urls", ["http://[:::]:1"]),
        ("peer_urls", ["http://host:1"] * 65),
        ("group", "../etc"),
        ("epoch", -1),
        ("epoch", 2**48 + 1),
        ("epoch", True),
        ("started_at_s", -1.0),
        ("num_experts", 0),
        ("models", ["x" * 257]),
        ("models", [""]),
        ("models", []),
        ("exchange_address", "x" * 321),
        ("shard", {"ep_rank": 0, "ep_size": 1, "first_expert": 0, "stop_expert": 8}),
    ],
)
def test_a_value_out_of_bounds_is_refused(field: str, value: object) -> None:
    with pytest.raises(ProtocolError):
        decode_to_router(registering(attn("attn-0"), **{field: value}))


def test_rank_0_tells_of_as_many_peers_and_ranks_as_there_can_be() -> None:
    peers = tuple(f"attn:{number:059d}" for number in range(MAX_PEERS + MAX_MLP_RANKS - 1))
    server = mlp("mlp-0").says(attached=peers)
    message = msgspec.structs.replace(server.registration, report=server.report)

    assert decode_to_router(encode(message)) == message


@pytest.mark.parametrize(
    "shard",
    [
        {"ep_rank": 1, "ep_size": 1, "first_expert": 0, "stop_expert": 8},
        {"ep_rank": 0, "ep_size": 1, "first_expert": 0, "stop_expert": 9},
        {"ep_rank": 0, "ep_size": 1, "first_expert": 4, "stop_expert": 4},
        {"ep_rank": 0, "ep_size": 10**6, "first_expert": 0, "stop_expert": 8},
    ],
)
def test_a_shard_that_cannot_be_is_refused(shard: dict[str, int]) -> None:
    with pytest.raises(ProtocolError):
        decode_to_router(registering(mlp("mlp-0"), shard=shard))


def test_an_ipv6_address_is_read() -> None:
    message = decode_to_router(registering(attn("attn-0"), url="http://[::1]:30000"))

    assert message.url == "http://[::1]:30000"


def test_a_body_that_is_too_long_is_refused_unread() -> None:
    body = b" " * MAX_MESSAGE_BYTES + GOLDEN[2][1]

    with pytest.raises(ProtocolError, match="at most 262144 are allowed"):
        decode_to_router(body)


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'{"type":1}', b"\xff", b"[" * 100_000])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    for read in (decode_to_router, decode_from_router):
        with pytest.raises(ProtocolError, match="not a"):
            read(body)
