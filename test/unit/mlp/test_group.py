from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.mlp.group import LEASE_S, RENEW_S, Group, MemberReport


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def report(rank: int, **changes: Any) -> MemberReport:
    base = MemberReport(
        rank=rank,
        ep_size=3,
        boot_id=f"boot-{rank}",
        fingerprint="ab" * 32,
        exchange_address=f"ipc:///run/{rank}",
        sent_at_s=0.0,
    )
    return msgspec.structs.replace(base, **changes)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def group(clock: Clock) -> Group:
    return Group(report(0), clock=clock)


def test_a_group_starts_with_rank_0(group: Group) -> None:
    assert group.members() == [report(0)]
    assert group.missing() == [1, 2]


def test_members_are_listed_by_rank_whatever_the_order_of_their_reports(group: Group) -> None:
    group.report(report(2))
    group.report(report(1))

    assert [member.rank for member in group.members()] == [0, 1, 2]
    assert group.missing() == []


def test_a_lease_ends_without_reports_but_that_of_rank_0_does_not(
    group: Group, clock: Clock
) -> None:
    group.report(report(1))

    clock.now_s += LEASE_S - 0.001
    assert group.missing() == [2]
    clock.now_s += 0.001
    assert group.missing() == [1, 2]
    clock.now_s += 1e9
    assert group.members() == [report(0)]


def test_a_report_renews_a_lease_for_long_enough_to_miss_one(group: Group, clock: Clock) -> None:
    for _ in range(10):
        group.report(report(1))
        clock.now_s += 2 * RENEW_S

    assert group.missing() == [2]


def test_a_restarted_member_may_move_once_its_lease_has_ended(group: Group, clock: Clock) -> None:
    group.report(report(1))
    successor = report(1, boot_id="again", exchange_address="ipc:///run/new")

    with pytest.raises(ConfigError) as caught:
        group.report(successor)
    clock.now_s += LEASE_S
    group.report(successor)

    assert "rank 1 is already served by ipc:///run/1" in str(caught.value)
    assert "stop it, or wait 6 s after it died" in str(caught.value)
    assert group.members()[1] == successor


def test_a_member_keeps_its_place_under_a_new_address(group: Group) -> None:
    group.report(report(1))

    group.report(report(1, exchange_address="tcp://10.0.0.5:7000"))

    assert group.members()[1].exchange_address == "tcp://10.0.0.5:7000"


@pytest.mark.parametrize(
    "changes", [{"rank": 0}, {"rank": 3}, {"rank": -1}, {"ep_size": 2}, {"ep_size": 4}]
)
def test_a_rank_that_does_not_fit_is_refused_with_both_sizes(
    group: Group, changes: dict[str, Any]
) -> None:
    member = msgspec.structs.replace(report(1), **changes)

    with pytest.raises(ConfigError) as caught:
        group.report(member)

    assert f"rank {member.rank} of --ep-size {member.ep_size} does not fit" in str(caught.value)
    assert "--ep-size 3, whose other ranks are 1 to 2" in str(caught.value)
    assert group.missing() == [1, 2]


def test_another_model_is_refused_with_both_fingerprints(group: Group) -> None:
    with pytest.raises(ConfigError, match="serves model cdcdcdcdcdcd, rank 0 serves abababababab"):
        group.report(report(1, fingerprint="cd" * 32))
