from __future__ import annotations

import msgspec
import pytest
from router_servers import GONE_S, RENEW_S, TTL_S, FakeServer, a_plane, attn

from sgl_router_afd.control.departed import KEEP_S
from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.registry import Entry, Registry
from sglang_afd.errors import Refused
from sglang_afd.protocol.registration import DeclineCode, Registration


def entry_of(server: FakeServer, registry: Registry) -> Entry:
    entry = registry.get(server.id)
    assert entry is not None
    return entry


def registered(server: FakeServer, now_s: float = 0.0) -> Registry:
    plane = a_plane()
    server.register(plane, now_s)
    return plane.registry


def test_a_renewed_lease_runs_on() -> None:
    server = attn("attn-0")
    registry = registered(server)

    registry.renew(server.renewal(), 5.0)

    assert entry_of(server, registry).is_here(5.0 + TTL_S - 0.1)


def test_a_lease_that_is_not_renewed_makes_a_server_late_and_later_gone() -> None:
    server = attn("attn-0")
    registry = registered(server)

    assert registry.expire(TTL_S + 0.5) == []
    assert entry_of(server, registry).absence(TTL_S + 0.5) == "its lease ran out 0.5 s ago"
    assert [entry.server_id for entry in registry.expire(GONE_S)] == ["attn-0"]
    assert registry.get("attn-0") is None


def test_a_server_that_was_late_once_is_here_again_at_its_next_renewal() -> None:
    server = attn("attn-0")
    registry = registered(server)

    registry.renew(server.renewal(), TTL_S + 1)

    assert entry_of(server, registry).is_here(TTL_S + 1)


def test_a_server_that_is_late_again_and_again_has_to_be_in_time_for_longer_each_time() -> None:
    server = attn("attn-0")
    registry = registered(server)
    owed = []

    for lapse in range(1, 5):
        now_s = lapse * (TTL_S + 1)
        registry.renew(server.renewal(), now_s)
        owed.append(entry_of(server, registry).steady_from_s - now_s)

    assert owed == [0, 2 * RENEW_S, 4 * RENEW_S, 8 * RENEW_S]
    assert "late again and again" in entry_of(server, registry).absence(now_s)


def test_a_probation_ends_while_leases_are_renewed_in_time() -> None:
    server = attn("attn-0")
    registry = registered(server)
    for now_s in (7.0, 14.0):
        registry.renew(server.renewal(), now_s)
    assert not entry_of(server, registry).is_here(15.0)

    for now_s in (16.0, 18.0):
        registry.renew(server.renewal(), now_s)

    assert entry_of(server, registry).is_here(18.0)


def test_registering_again_does_not_shorten_a_probation() -> None:
    server = attn("attn-0")
    plane = a_plane()
    server.register(plane, 0.0)
    for now_s in (7.0, 14.0):
        server.renew(plane, now_s)

    server.register(plane, 14.5)

    assert not entry_of(server, plane.registry).is_here(15.0)


def test_lapses_are_forgotten_in_time() -> None:
    server = attn("attn-0")
    registry = registered(server)
    registry.renew(server.renewal(), 7.0)
    for now_s in range(12, 100, 5):
        registry.renew(server.renewal(), now_s)
        registry.expire(now_s)

    registry.renew(server.renewal(), 97.0 + TTL_S + 1)

    assert entry_of(server, registry).is_here(97.0 + TTL_S + 1)


def test_a_late_message_changes_nothing() -> None:
    server = attn("attn-0")
    registry = registered(server)
    old, new = server.says(reason="old").renewal(), server.says(reason="new").renewal()
    registry.renew(new, 1.0)

    registry.renew(old, 5.0)

    assert entry_of(server, registry).report.reason == "new"
    assert entry_of(server, registry).expires_s == 1.0 + TTL_S


def test_a_router_that_was_restarted_asks_servers_to_register_again() -> None:
    server = attn("attn-0")
    registered(server)
    restarted = a_plane().registry

    with pytest.raises(Refused, match="register again") as caught:
        restarted.renew(server.renewal(), 1.0)

    assert caught.value.code == DeclineCode.UNKNOWN_LEASE


def test_a_newer_process_replaces_an_older_one_of_its_name() -> None:
    old = attn("attn-0")
    plane = a_plane()
    old.register(plane, 0.0)
    new = old.restarted("boot-2")

    new.register(plane, 1.0)

    assert entry_of(new, plane.registry).boot_id == "boot-2"
    with pytest.raises(Refused, match="newer process has taken this place") as caught:
        old.renew(plane, 2.0)
    assert caught.value.code == DeclineCode.REPLACED


def test_an_older_process_does_not_come_back() -> None:
    old = attn("attn-0")
    new = old.restarted("boot-2")
    plane = a_plane()
    new.register(plane, 0.0)

    with pytest.raises(Refused, match=r"newer.*boot id boot-2; stop one"):
        old.register(plane, 1.0)

    assert entry_of(new, plane.registry).boot_id == "boot-2"


def test_a_newer_process_replaces_one_of_another_name_at_its_address() -> None:
    old, new = attn("attn-0"), attn("attn-1", url="http://attn-0:30000", started_at_s=2000.0)
    plane = a_plane()
    old.register(plane, 0.0)

    new.register(plane, 1.0)

    assert [entry.server_id for entry in plane.registry] == ["attn-1"]


def test_one_process_has_one_name() -> None:
    server = attn("attn-0")
    other = attn("attn-1", url="http://attn-0:30000", boot_id=server.boot_id)
    plane = a_plane()
    server.register(plane, 0.0)

    with pytest.raises(Refused, match="attn-0 at http://attn-0:30000"):
        other.register(plane, 1.0)

    assert [entry.server_id for entry in plane.registry] == ["attn-0"]


def test_a_server_that_leaves_is_gone_at_once() -> None:
    server = attn("attn-0")
    registry = registered(server)

    registry.leave(server.leaving(), 1.0)

    assert len(registry) == 0


def replayed(registration: Registration, plane: ControlPlane, now_s: float) -> str:
    """Play a message back; returns what is said against it."""
    with pytest.raises(Refused) as caught:
        plane.register(registration, now_s)
    assert caught.value.code == DeclineCode.UNKNOWN_LEASE
    assert plane.registry.get(registration.server_id) is None
    return str(caught.value)


def test_a_registration_that_is_played_back_after_a_goodbye_brings_no_server_back() -> None:
    plane, server = a_plane(), attn("attn-0")
    server.register(plane, 0.0)
    captured = server.registration
    server.leave(plane, 1.0)

    said = replayed(captured, plane, 2.0), replayed(captured, plane, 1.0 + KEEP_S - 0.1)

    assert "attn-0 said goodbye since it sent this" in said[0]
    assert said[0] == said[1]


def test_a_registration_that_a_goodbye_overtook_brings_no_server_back() -> None:
    plane, server = a_plane(), attn("attn-0")
    server.register(plane, 0.0)
    late = msgspec.structs.replace(
        server.registration,
        sent_at_s=server.sent_at_s + 0.0001,
        report=msgspec.structs.replace(server.report, seq=server.report.seq + 1),
    )
    server.leave(plane, 1.0)

    assert "said goodbye" in replayed(late, plane, 1.1)


@pytest.mark.parametrize("way", ["remove", "expire"])
def test_a_server_that_is_gone_without_a_goodbye_comes_back_by_a_new_message_alone(
    way: str,
) -> None:
    plane, server = a_plane(), attn("attn-0")
    server.register(plane, 0.0)
    captured = server.registration
    server.renew(plane, 1.0)
    plane.remove("attn-0", 1.0) if way == "remove" else plane.update(1.0 + GONE_S)

    said = replayed(captured, plane, 2.0 + GONE_S)
    server.register(plane, 3.0 + GONE_S)

    assert "attn-0 has said more since it sent this" in said
    assert entry_of(server, plane.registry).boot_id == server.boot_id


def test_an_older_process_that_was_replaced_does_not_come_back_when_the_newer_said_goodbye() -> (
    None
):
    plane, old = a_plane(), attn("attn-0")
    old.register(plane, 0.0)
    captured = old.registration
    new = old.restarted("boot-2")
    new.register(plane, 1.0)
    new.leave(plane, 2.0)

    assert "said goodbye" in replayed(captured, plane, 3.0)


def test_a_process_that_lives_may_register_after_another_of_its_name_said_goodbye() -> None:
    plane, old = a_plane(), attn("attn-0")
    new = old.restarted("boot-2")
    new.register(plane, 1.0)
    new.leave(plane, 2.0)

    old.sent_at_s = new.sent_at_s
    old.register(plane, 3.0)

    assert entry_of(old, plane.registry).boot_id == old.boot_id


def test_a_later_process_registers_at_once_after_a_goodbye_whatever_its_clock_says() -> None:
    plane, old = a_plane(), attn("attn-0")
    old.register(plane, 0.0)
    old.leave(plane, 1.0)
    new = old.restarted("boot-2")
    new.sent_at_s = 0.0

    new.register(plane, 1.1)

    assert entry_of(new, plane.registry).boot_id == "boot-2"


def test_a_goodbye_is_remembered_only_as_long_as_a_signature_counts() -> None:
    plane, server = a_plane(), attn("attn-0")
    server.register(plane, 0.0)
    captured = server.registration
    server.leave(plane, 1.0)

    plane.register(captured, 1.0 + KEEP_S)  # nobody but this test gets such a message so far

    assert len(plane.registry) == 1


def test_the_address_of_a_server_that_moved_is_free_for_another() -> None:
    plane, server = a_plane(), attn("attn-0")
    server.register(plane, 0.0)
    server.registration = msgspec.structs.replace(server.registration, url="http://new:1")
    server.register(plane, 1.0)
    other = attn("attn-1", url="http://attn-0:30000", started_at_s=500.0)

    other.register(plane, 2.0)

    assert [entry.server_id for entry in plane.registry] == ["attn-0", "attn-1"]


def test_a_drained_server_stays_so_when_it_registers_again_and_not_when_it_is_restarted() -> None:
    server = attn("attn-0")
    plane = a_plane()
    server.register(plane, 0.0)
    plane.drain("attn-0", "an operator asked", 1.0)

    again = server.register(plane, 2.0)
    anew = server.restarted("boot-2").register(plane, 3.0)

    assert again.is_draining
    assert not anew.is_draining


def test_the_next_change_by_time_alone_is_named() -> None:
    registry = registered(attn("attn-0"))

    assert registry.next_change_s(0.0) == TTL_S
    assert registry.next_change_s(TTL_S) == GONE_S
    assert registry.next_change_s(GONE_S) is None
