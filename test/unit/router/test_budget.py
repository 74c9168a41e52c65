from __future__ import annotations

from sgl_router_afd.dataplane.budget import RESERVE, RetryBudget


def spend_all(budget: RetryBudget) -> int:
    num = 0
    while budget.spend():
        num += 1
    return num


def test_the_reserve_covers_a_servers_death_and_then_traffic_earns_its_share() -> None:
    budget = RetryBudget(0.2)

    assert spend_all(budget) == RESERVE

    for _ in range(50):
        budget.earn()
    assert spend_all(budget) in (9, 10)  # 0.2 is no binary fraction


def test_quiet_days_save_no_more_than_the_reserve() -> None:
    budget = RetryBudget(1.0)
    for _ in range(10_000):
        budget.earn()

    assert spend_all(budget) == RESERVE


def test_no_share_is_no_replay_at_all() -> None:
    budget = RetryBudget(0.0)
    budget.earn()

    assert not budget.spend()
