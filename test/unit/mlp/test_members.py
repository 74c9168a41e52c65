from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from peers import SECRET
from registering import silent_registrar

from sglang_afd.errors import ConfigError
from sglang_afd.mlp.board import Board
from sglang_afd.mlp.group import MemberReport
from sglang_afd.mlp.http import MAX_SKEW_S, Endpoints
from sglang_afd.mlp.place import Place
from sglang_afd.protocol import auth

HERE, ELSEWHERE = "127.0.0.1", "10.0.0.5"


def report(rank: int = 1, **changes: Any) -> MemberReport:
    base = MemberReport(
        rank=rank,
        ep_size=2,
        boot_id="boot",
        fingerprint="ab",
        exchange_address="tcp://0.0.0.0:7000",
        sent_at_s=time.time(),
    )
    return msgspec.structs.replace(base, **changes)


@pytest.fixture
def place() -> Place:
    board = Board(1)
    place = Place({}, report(0), board)
    place.lead(is_successor=False)
    return place


def send(
    place: Place,
    member: MemberReport,
    *,
    own_secret: bytes = SECRET,
    secret: bytes = SECRET,
    remote: str = ELSEWHERE,
    proof: str = "",
) -> list[str]:
    body = msgspec.json.encode(member)
    endpoints = Endpoints(Board(1), place, own_secret, silent_registrar())
    endpoints.accept(body, proof or auth.prove(secret, "member", body).hex(), remote)
    assert place.group is not None
    return [one.exchange_address for one in place.group.members()[1:]]


def test_a_member_is_listed_where_rank_0_saw_it(place: Place) -> None:
    assert send(place, report()) == ["tcp://10.0.0.5:7000"]


@pytest.mark.parametrize("remote", [HERE, "::1", "::ffff:127.0.0.1"])
def test_a_member_on_this_host_needs_no_secret(place: Place, remote: str) -> None:
    member = report(exchange_address="ipc:///run/1")

    assert send(place, member, own_secret=b"", secret=b"", remote=remote) == ["ipc:///run/1"]


def test_a_member_elsewhere_needs_a_secret(place: Place) -> None:
    with pytest.raises(ConfigError, match="other hosts need the same --afd-secret-file"):
        send(place, report(), own_secret=b"", secret=b"")


@pytest.mark.parametrize("proof", ["00" * 32, "nonsense", "\u00e9"])
def test_a_member_with_a_wrong_proof_is_refused(place: Place, proof: str) -> None:
    with pytest.raises(ConfigError, match="secret is not rank 0's"):
        send(place, report(), proof=proof)


@pytest.mark.parametrize("age_s", [MAX_SKEW_S + 5, -MAX_SKEW_S - 5])
def test_a_report_played_back_later_is_refused(place: Place, age_s: float) -> None:
    with pytest.raises(ConfigError, match="older than 60 s; are the clocks set"):
        send(place, report(sent_at_s=time.time() - age_s))


def test_only_rank_0_takes_reports() -> None:
    follower = Place({}, report(1), Board(1))

    with pytest.raises(ConfigError, match="this is not rank 0; give --afd-leader"):
        send(follower, report())


def test_a_report_that_is_none_is_refused(place: Place) -> None:
    body = b'{"rank": 1}'

    with pytest.raises(msgspec.ValidationError):
        Endpoints(Board(1), place, SECRET, silent_registrar()).accept(
            body, auth.prove(SECRET, "member", body).hex(), HERE
        )
