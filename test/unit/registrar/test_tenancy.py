"""When a server speaks to its router, and what it makes of the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from registering import Server, lease_of, loaded

from sglang_afd.protocol.registration import (
    Condition,
    Decline,
    DeclineCode,
    PeerLoss,
    Registration,
    Renewal,
)
from sglang_afd.registrar.speaker import Speaker
from sglang_afd.registrar.tenancy import FIRST_RETRY_S, HASTY_RENEW_S, MAX_RETRY_S, Tenancy

UNKNOWN = Decline(code=DeclineCode.UNKNOWN_LEASE, message="register again")


class Bench:
    """One server, one tenancy, and a clock that only the test moves."""

    def __init__(self) -> None:
        self.server = Server()
        self.speaker = Speaker(self.server.describe, wall_clock=lambda: 1000.0)
        self.tenancy = Tenancy(self.speaker, draw=lambda: 1.0)
        self.now_s = 100.0

    def ask(self, after_s: float = 0.0) -> Registration | Renewal | None:
        self.now_s += after_s
        return self.tenancy.next_message(self.server.describe(), self.now_s)

    def stand(self, **changes: object) -> None:
        self.server.standing = replace(self.server.standing, **changes)  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def tenant(bench: Bench) -> Bench:
    """It has just got a lease."""
    assert isinstance(bench.ask(), Registration)
    bench.tenancy.take(lease_of(), bench.now_s)
    return bench


def test_a_server_registers_first(bench: Bench) -> None:
    message = bench.ask()

    assert isinstance(message, Registration)
    assert (message.server_id, message.boot_id) == ("attn-0", "boot-1")
    assert (message.group, message.epoch) == ("", 0)


def test_it_renews_when_the_lease_asks_for_it_and_not_before(tenant: Bench) -> None:
    assert tenant.ask(1.9) is None
    renewal = tenant.ask(0.1)

    assert isinstance(renewal, Renewal)
    assert renewal.lease_id == "router-1"


def test_its_reports_are_counted(tenant: Bench) -> None:
    renewal = tenant.ask(2.0)

    assert isinstance(renewal, Renewal)
    assert renewal.report.seq == 2


@pytest.mark.parametrize(
    "change",
    [
        {"condition": Condition.STALLED},
        {"attached": ("another",)},
        {"lost": (PeerLoss(boot_id="mlp-boot", reason="silent"),)},
    ],
)
def test_news_is_told_at_once(tenant: Bench, change: dict[str, object]) -> None:
    tenant.stand(**change)

    assert isinstance(tenant.ask(0.2), Renewal)
    assert tenant.ask(0.2) is None


def test_a_drain_is_told_at_once_and_then_often(tenant: Bench) -> None:
    tenant.speaker.is_draining = True

    renewal = tenant.ask(0.2)
    assert isinstance(renewal, Renewal)
    assert renewal.report.is_draining
    tenant.tenancy.take(lease_of(), tenant.now_s)
    assert tenant.ask(HASTY_RENEW_S - 0.01) is None
    assert isinstance(tenant.ask(0.01), Renewal)


def test_the_end_of_the_last_request_is_told_at_once_while_it_drains(tenant: Bench) -> None:
    tenant.speaker.is_draining = True
    tenant.stand(load=loaded(1))
    tenant.ask()
    tenant.tenancy.take(lease_of(), tenant.now_s)

    tenant.stand(load=loaded(0))

    assert isinstance(tenant.ask(0.1), Renewal)


def test_load_alone_waits_for_the_next_renewal(tenant: Bench) -> None:
    tenant.stand(load=loaded(3))

    assert tenant.ask(0.2) is None


def test_a_server_that_looks_for_its_mlp_servers_asks_often(bench: Bench) -> None:
    bench.stand(condition=Condition.STARTING)
    bench.ask()
    bench.tenancy.take(lease_of(), bench.now_s)

    assert isinstance(bench.ask(HASTY_RENEW_S), Renewal)


def test_a_changed_identity_is_registered_anew(tenant: Bench) -> None:
    tenant.server.identity = replace(tenant.server.identity, exchange_address="tcp://h:7000")

    message = tenant.ask(0.2)

    assert isinstance(message, Registration)
    assert message.exchange_address == "tcp://h:7000"


def test_after_a_router_restart_it_registers_at_once_with_what_it_was_told(tenant: Bench) -> None:
    tenant.ask(2.0)
    tenant.tenancy.decline(UNKNOWN, tenant.now_s)

    message = tenant.ask()

    assert isinstance(message, Registration)
    assert (message.group, message.epoch) == ("group-1", 3)


def test_a_router_that_never_knows_it_is_not_asked_without_pause(tenant: Bench) -> None:
    tenant.ask(2.0)
    tenant.tenancy.decline(UNKNOWN, tenant.now_s)
    tenant.ask()
    tenant.tenancy.decline(UNKNOWN, tenant.now_s)

    assert tenant.ask(FIRST_RETRY_S - 0.01) is None
    assert isinstance(tenant.ask(0.01), Registration)


def test_pauses_grow_while_no_router_answers_and_news_does_not_shorten_them(bench: Bench) -> None:
    pauses = []
    for _ in range(6):
        assert bench.ask() is not None
        bench.tenancy.fail("nobody", bench.now_s)
        bench.stand(attached=(f"boot-{len(pauses)}",))
        waited_s = 0.0
        while bench.ask(0.25) is None:
            waited_s += 0.25
        pauses.append(waited_s + 0.25)

    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert max(pauses) == MAX_RETRY_S


def test_pauses_are_shorter_than_the_leases_of_the_router_so_that_a_new_one_hears_in_time(
    tenant: Bench,
) -> None:
    tenant.tenancy.take(lease_of(ttl_s=1.5), tenant.now_s)

    for _ in range(6):
        tenant.tenancy.fail("nobody", tenant.now_s)

    assert tenant.ask(1.0) is not None


def test_an_answer_ends_the_pauses(bench: Bench) -> None:
    for _ in range(4):
        bench.ask(10)
        bench.tenancy.fail("nobody", bench.now_s)
    bench.ask(10)
    bench.tenancy.take(lease_of(), bench.now_s)
    bench.ask(2)

    bench.tenancy.fail("nobody", bench.now_s)

    assert bench.ask(FIRST_RETRY_S) is not None


def test_a_lease_that_ran_out_is_none(tenant: Bench) -> None:
    assert tenant.tenancy.holds_at(tenant.now_s + 5.9) is not None
    assert tenant.tenancy.holds_at(tenant.now_s + 6.0) is None


def test_an_error_is_shown_until_a_lease_comes(tenant: Bench) -> None:
    tenant.tenancy.fail("no router answers", tenant.now_s)
    assert tenant.tenancy.last_error == "no router answers"

    tenant.tenancy.take(lease_of(), tenant.now_s)

    assert tenant.tenancy.last_error == ""


def test_a_declined_server_asks_again_and_says_why(tenant: Bench) -> None:
    decline = Decline(code=DeclineCode.REPLACED, message="a newer process has this place")
    tenant.tenancy.decline(decline, tenant.now_s)

    assert "a newer process" in tenant.tenancy.last_error
    assert tenant.ask(FIRST_RETRY_S - 0.01) is None
    assert isinstance(tenant.ask(0.01), Registration)


def test_an_epoch_that_goes_back_is_not_followed_and_the_larger_is_said_again(
    tenant: Bench,
) -> None:
    tenant.ask(2.0)

    assert not tenant.tenancy.take(lease_of(epoch=2), tenant.now_s)
    assert "says epoch 2 of group-1, and said 3" in tenant.tenancy.last_error
    assert tenant.ask(1.9) is None
    message = tenant.ask(0.1)

    assert isinstance(message, Registration)
    assert (message.group, message.epoch) == ("group-1", 3)


def test_an_epoch_that_has_caught_up_is_followed_again(tenant: Bench) -> None:
    tenant.tenancy.take(lease_of(epoch=2), tenant.now_s)
    tenant.ask(2.0)

    assert tenant.tenancy.take(lease_of(epoch=3), tenant.now_s)
    assert isinstance(tenant.ask(2.0), Renewal)


def test_another_group_may_have_a_smaller_epoch(tenant: Bench) -> None:
    assert tenant.tenancy.take(lease_of(group="group-2", epoch=1), tenant.now_s)
    assert (tenant.speaker.group, tenant.speaker.epoch) == ("group-2", 1)


def test_a_router_that_knows_no_group_yet_takes_none_away(tenant: Bench) -> None:
    assert tenant.tenancy.take(lease_of(group="", epoch=0), tenant.now_s)
    assert (tenant.speaker.group, tenant.speaker.epoch) == ("group-1", 3)
