from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.mlp.group import LEASE_S, RENEW_S, START_GRACE_S, Group, MemberReport
from sglang_afd.mlp.spare import Candidate, Claim, Decision, Lead, Seen, Wait, Watch

PRINT, SIZE = "ab" * 32, 3
MAIN, FIRST, SECOND = "http://main", "http://first", "http://second"
URLS = (MAIN, FIRST, SECOND)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def leader(missing: Sequence[int] = (), claimable: Sequence[int] = (), **changes: Any) -> Seen:
    base = Seen(
        role="mlp",
        state="ready",
        boot_id="boot-main",
        fingerprint=PRINT,
        ep_size=SIZE,
        missing_ranks=tuple(missing),
        claimable_ranks=tuple(claimable),
    )
    return msgspec.structs.replace(base, **changes)


def waiting(boot_id: str) -> Seen:
    return Seen(role="mlp", state="spare", boot_id=boot_id, fingerprint=PRINT, ep_size=SIZE)


SPARE_1, SPARE_2 = waiting("boot-1"), waiting("boot-2")


def watch(clock: Clock, boot_id: str = "boot-1", **changes: Any) -> Watch:
    candidate = {"boot_id": boot_id, "fingerprint": PRINT, "ep_size": SIZE, "owns_rank_0": False}
    return Watch(URLS, Candidate(**candidate | changes), clock=clock)


def reason(decision: Decision) -> str:
    assert isinstance(decision, Wait)
    return decision.reason


def test_a_spare_waits_while_no_rank_is_free(clock: Clock) -> None:
    one = watch(clock)

    for missing in ((), (1,), (0, 1, 2)):  # missing, but somebody may come or loads already
        assert "no rank of the group of http://main is free" in reason(
            one.decide([leader(missing), SPARE_1, None])
        )


def test_a_spare_asks_the_leader_for_the_first_rank_that_is_free(clock: Clock) -> None:
    decision = watch(clock).decide([leader([1, 2], [1, 2]), SPARE_1, SPARE_2])

    assert decision == Claim(MAIN, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ep_size": 2}, "has --ep-size 2, this server has 3"),
        ({"fingerprint": "cd" * 32}, "serves model cdcdcdcdcdcd, this server has abababababab"),
    ],
)
def test_a_spare_of_another_group_takes_neither_its_ranks_nor_its_lead(
    clock: Clock, changes: dict[str, Any], words: str
) -> None:
    one = watch(clock)

    assert words in reason(one.decide([leader([1], [1], **changes), SPARE_1, None]))
    clock.now_s += 1e6
    assert words in reason(one.decide([None, SPARE_1, None]))


def test_a_leader_that_is_silent_for_a_lease_is_replaced(clock: Clock) -> None:
    one = watch(clock)
    one.decide([leader(), SPARE_1, SPARE_2])

    clock.now_s += LEASE_S - 0.001
    assert "takes its place" in reason(one.decide([None, SPARE_1, SPARE_2]))
    clock.now_s += 0.001
    assert one.decide([None, SPARE_1, SPARE_2]) == Lead(is_successor=True)


def test_a_leader_that_answers_again_is_not_replaced(clock: Clock) -> None:
    one = watch(clock)
    for _ in range(10):
        one.decide([leader(), SPARE_1, None])
        clock.now_s += LEASE_S - 0.001
        assert isinstance(one.decide([None, SPARE_1, None]), Wait)


def test_a_leader_that_was_never_there_has_the_time_of_a_start(clock: Clock) -> None:
    one = watch(clock)

    clock.now_s += START_GRACE_S - 0.001
    assert isinstance(one.decide([None, SPARE_1, None]), Wait)
    clock.now_s += 0.001
    assert one.decide([None, SPARE_1, None]) == Lead(is_successor=False)


def test_of_two_spares_the_first_in_the_list_leads_and_the_other_follows_it(clock: Clock) -> None:
    one, other = watch(clock, "boot-1"), watch(clock, "boot-2")
    for each in (one, other):
        each.decide([leader(), SPARE_1, SPARE_2])

    clock.now_s += LEASE_S
    assert isinstance(other.decide([None, SPARE_1, SPARE_2]), Wait)
    assert one.decide([None, SPARE_1, SPARE_2]) == Lead(is_successor=True)
    successor = leader([0, 1], [1], boot_id="boot-1", state="loading")
    assert other.decide([None, successor, SPARE_2]) == Claim(FIRST, 1)


def test_the_second_spare_leads_when_the_first_does_not(clock: Clock) -> None:
    dead, stuck = watch(clock, "boot-2"), watch(clock, "boot-2")
    for each in (dead, stuck):
        each.decide([leader(), SPARE_1, SPARE_2])

    clock.now_s += LEASE_S
    assert isinstance(dead.decide([None, None, SPARE_2]), Lead)
    assert isinstance(stuck.decide([None, SPARE_1, SPARE_2]), Wait)
    clock.now_s += LEASE_S
    assert isinstance(stuck.decide([None, SPARE_1, SPARE_2]), Lead)


def test_a_spare_that_has_become_a_rank_is_waited_for_by_nobody(clock: Clock) -> None:
    second = watch(clock, "boot-2")
    second.decide([leader(), SPARE_1, SPARE_2])

    clock.now_s += LEASE_S
    became_rank_1 = msgspec.structs.replace(SPARE_1, state="ready")

    assert second.decide([None, became_rank_1, SPARE_2]) == Lead(is_successor=True)


def test_a_spare_that_nobody_would_find_does_not_lead(clock: Clock) -> None:
    one = watch(clock, "boot-elsewhere")
    one.decide([leader(), SPARE_1, None])

    clock.now_s += 1e6

    assert "own address is not among those of --afd-leader" in reason(
        one.decide([None, None, None])
    )


def test_rank_0_leads_at_once_unless_another_does(clock: Clock) -> None:
    fresh = watch(clock, "boot-main", owns_rank_0=True)
    late = watch(clock, "boot-main", owns_rank_0=True)
    own = waiting("boot-main")

    assert fresh.decide([own, SPARE_1, None]) == Lead(is_successor=False)
    assert isinstance(late.decide([own, leader(boot_id="boot-1"), None]), Wait)
    assert isinstance(late.decide([own, None, None]), Wait)  # a spare like any other from now on
    clock.now_s += LEASE_S
    assert late.decide([own, None, None]) == Lead(is_successor=True)


def test_of_two_groups_the_whole_one_is_watched_and_stays_so(clock: Clock) -> None:
    one = watch(clock, "boot-2")
    lonely = leader([1, 2], [1, 2])  # came back after its followers had found another

    assert isinstance(one.decide([lonely, leader(boot_id="boot-1"), SPARE_2]), Wait)
    degraded = leader([1, 2], [2], boot_id="boot-1")
    assert one.decide([leader(), degraded, SPARE_2]) == Claim(FIRST, 2)


def claim(rank: int, boot_id: str) -> MemberReport:
    return MemberReport(
        rank=rank,
        ep_size=SIZE,
        boot_id=boot_id,
        fingerprint=PRINT,
        exchange_address="",
        sent_at_s=0.0,
        is_claim=True,
    )


def serving(rank: int, boot_id: str) -> MemberReport:
    address = f"ipc:///run/{boot_id}"
    return msgspec.structs.replace(claim(rank, boot_id), exchange_address=address, is_claim=False)


@pytest.fixture
def group(clock: Clock) -> Group:
    """Whole: ranks 0, 1 and 2 serve."""
    group = Group(serving(0, "boot-main"), clock=clock)
    group.report(serving(1, "r1"))
    group.report(serving(2, "r2"))
    return group


def test_a_lost_rank_is_free_and_a_claimed_one_is_missing_until_it_serves(
    group: Group, clock: Clock
) -> None:
    clock.now_s += LEASE_S
    group.report(serving(2, "r2"))
    assert (group.missing(), group.loading(), group.claimable()) == ([1], [], [1])

    group.report(claim(1, "s1"))
    assert (group.missing(), group.loading(), group.claimable()) == ([1], [1], [])
    assert [member.rank for member in group.members()] == [0, 2]

    group.report(serving(1, "s1"))
    assert (group.missing(), group.loading(), group.claimable()) == ([], [], [])
    assert group.members()[1].exchange_address == "ipc:///run/s1"


def test_of_two_spares_that_race_for_a_rank_one_has_it(group: Group, clock: Clock) -> None:
    clock.now_s += LEASE_S
    group.report(claim(1, "s1"))

    with pytest.raises(ConfigError, match=r"rank 1 is already being loaded .*\(boot id s1\)"):
        group.report(claim(1, "s2"))
    assert group.loading() == [1]
    for _ in range(100):  # however long the winner loads
        clock.now_s += RENEW_S
        group.report(msgspec.structs.replace(claim(1, "s1"), is_claim=False))
        with pytest.raises(ConfigError):
            group.report(claim(1, "s2"))


def test_a_spare_that_dies_while_it_loads_makes_room_for_the_next(
    group: Group, clock: Clock
) -> None:
    clock.now_s += LEASE_S
    group.report(claim(1, "s1"))
    clock.now_s += LEASE_S

    group.report(claim(1, "s2"))

    assert group.loading() == [1]


def test_a_rank_that_returns_finds_its_place_taken_and_has_it_back_when_that_ends(
    group: Group, clock: Clock
) -> None:
    clock.now_s += LEASE_S
    group.report(claim(1, "s1"))
    group.report(serving(1, "s1"))

    with pytest.raises(ConfigError, match="rank 1 is already served by ipc:///run/s1"):
        group.report(serving(1, "r1 again"))
    clock.now_s += LEASE_S
    group.report(serving(1, "r1 again"))

    assert group.members()[-1].boot_id == "r1 again"


def test_a_spare_may_not_take_a_rank_whose_lease_runs(group: Group) -> None:
    with pytest.raises(ConfigError, match="rank 1 is already served by"):
        group.report(claim(1, "s1"))


def test_a_start_is_not_disturbed_by_spares(clock: Clock) -> None:
    group = Group(serving(0, "boot-main"), clock=clock)
    group.report(msgspec.structs.replace(claim(1, "r1"), is_claim=False))  # loads

    assert (group.missing(), group.loading(), group.claimable()) == ([1, 2], [1], [])
    with pytest.raises(ConfigError, match="rank 2 was never there .* its place in 120 s"):
        group.report(claim(2, "s1"))
    clock.now_s += START_GRACE_S
    group.report(claim(2, "s1"))
    assert group.loading() == [2]


def test_a_successor_lets_the_living_report_before_spares_may_claim(clock: Clock) -> None:
    group = Group(claim(0, "s1"), grace_s=LEASE_S, clock=clock)  # still loading itself
    assert (group.missing(), group.loading(), group.claimable()) == ([0, 1, 2], [0], [])

    clock.now_s += RENEW_S
    group.report(serving(1, "r1"))
    with pytest.raises(ConfigError, match="rank 2 was never there"):
        group.report(claim(2, "s2"))
    clock.now_s += LEASE_S - RENEW_S
    assert group.claimable() == [2]

    group.lead(serving(0, "s1"))
    assert (group.missing(), group.loading()) == ([2], [])
