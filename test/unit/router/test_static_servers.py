"""Static servers: answers in, what the control plane makes of them out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from fake_loop import FakeLoop
from fake_registration import FakeRegistration
from router_servers import TTL_S, a_plane, attn, mlp, pass_probes, register_all, settle, told

from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.standing import Standing
from sgl_router_afd.static_servers import StaticServer, StaticServers
from sglang_afd.config import Role
from sglang_afd.protocol.registration import Registration, Renewal, decode_to_router, encode

URL = "http://10.0.0.1:30001"
READY = {"role": "attn", "state": "ready"}


class World:
    """One static server of a plane."""

    def __init__(self, role: Role = Role.ATTN) -> None:
        self.loop = FakeLoop()
        self.plane: ControlPlane = a_plane()
        self.num_changes = 0
        self.servers = StaticServers(self.plane, self.loop.time, self._count)
        self.servers.add(role, URL)
        self.process = FakeRegistration()

    @property
    def static(self) -> StaticServer:
        return self.servers.all()[0]

    def answer(self, status: Mapping[str, Any] = READY) -> None:
        self.servers.on_answer(self.static, 200, self.process.body(30001, status))

    def standing(self) -> Standing:
        view = self.plane.groups.of("attn-30001")
        assert view is not None
        return view.stands["attn-30001"].standing

    def _count(self) -> None:
        self.num_changes += 1
        settle(self.plane, self.loop.now_s)


def test_a_server_that_answers_is_registered_under_the_url_that_the_router_was_given() -> None:
    world = World()

    world.answer()

    entry = world.plane.registry.get("attn-30001")
    assert entry is not None and entry.registration.url == URL
    assert world.servers.url_of("attn-30001") == URL
    assert world.servers.unheard() == ()
    assert world.num_changes > 0


def test_every_answer_renews_the_lease_and_takes_the_report() -> None:
    world = World()
    world.answer()
    pass_probes(world.plane, world.loop.now_s)

    for _ in range(4):
        world.loop.advance(TTL_S / 2)
        world.answer()
        world.plane.update(world.loop.now_s)
    serving = world.standing()
    world.answer({"role": "attn", "state": "stalled", "reason": "rank 0 is gone"})

    assert serving is Standing.SERVING
    assert world.standing() is Standing.DEGRADED


def test_a_lease_is_renewed_with_the_stamp_of_the_servers_clock() -> None:
    world = World()
    world.answer()
    told = decode_to_router(world.process.body(30001, READY))
    assert isinstance(told, Registration)
    ahead = msgspec.structs.replace(told, sent_at_s=told.sent_at_s + 1000)

    world.servers.on_answer(world.static, 200, encode(ahead))

    entry = world.plane.registry.get("attn-30001")
    assert entry is not None and entry.sent_at_s == ahead.sent_at_s


def test_a_lease_that_ran_out_is_taken_anew_in_the_same_group() -> None:
    world = World()
    world.answer()
    before = told(world.plane, "attn-30001")
    world.loop.advance(2 * TTL_S)
    world.plane.update(world.loop.now_s)
    gone = world.servers.unheard()

    world.answer()

    after = told(world.plane, "attn-30001")
    assert gone == ((URL, ""),)
    assert after.group == before.group and after.epoch > before.epoch


def test_a_restarted_process_takes_the_place_of_the_one_before() -> None:
    world = World()
    world.answer()
    first = world.plane.registry.get("attn-30001")

    world.process = FakeRegistration()
    world.answer()

    second = world.plane.registry.get("attn-30001")
    assert first is not None and second is not None
    assert first.boot_id != second.boot_id
    assert len(world.plane.registry) == 1


def test_what_a_server_learns_of_itself_while_it_starts_is_taken_up() -> None:
    world = World()
    world.answer()
    before = world.plane.registry.get("attn-30001")

    told = decode_to_router(world.process.body(30001, READY))
    assert isinstance(told, Registration)
    later = msgspec.structs.replace(told, exchange_address="tcp://10.0.0.1:9")
    world.servers.on_answer(world.static, 200, encode(later))

    after = world.plane.registry.get("attn-30001")
    assert before is not None and after is not None
    assert before.registration.exchange_address == ""
    assert after.registration.exchange_address == "tcp://10.0.0.1:9"
    assert world.servers.url_of("attn-30001") == URL


def test_a_refused_connection_takes_requests_away_at_once_and_counts_as_one_trouble() -> None:
    world = World()
    world.answer()
    pass_probes(world.plane, 0.0)
    before = world.standing()

    world.servers.on_refusal(world.static, "connection refused")
    refused = world.standing()
    pass_probes(world.plane, 0.0)
    world.servers.on_refusal(world.static, "connection refused")

    assert (before, refused) == (Standing.SERVING, Standing.DEGRADED)
    assert world.standing() is Standing.SERVING  # the probe that passed knows better


def test_an_unanswered_question_takes_nothing_away_while_the_lease_runs() -> None:
    world = World()
    world.answer()
    pass_probes(world.plane, 0.0)

    world.servers.on_silence(world.static, "no answer within 2 s")
    world.plane.update(1.0)
    early = world.standing()
    world.plane.update(TTL_S)

    assert (early, world.standing()) == (Standing.SERVING, Standing.DEGRADED)


@pytest.mark.parametrize(
    ("http_status", "body", "reason"),
    [
        (404, b"", "not an sglang-afd server \\(or an older one\\).*--role attn"),
        (500, b"oops", "answered 500, wanted 200: oops"),
        (200, b"<html>", "not a message of an sglang-afd server"),
        (200, b'{"type":"register","version":7}', "registers with version 7"),
    ],
)
def test_an_answer_that_is_no_registration_is_told_as_the_reason(
    http_status: int, body: bytes, reason: str
) -> None:
    world = World()

    world.servers.on_answer(world.static, http_status, body)

    ((url, told),) = world.servers.unheard()
    assert url == URL
    assert re.search(reason, told)
    assert len(world.plane.registry) == 0


@pytest.mark.parametrize(
    ("given", "status", "reason"),
    [
        (Role.ATTN, {"role": "mlp", "state": "ready"}, "its role is mlp.*give it with --mlp"),
        (Role.MLP, READY, "its role is attn.*give it with --attn"),
    ],
)
def test_a_server_of_the_other_role_is_not_taken(
    given: Role, status: dict[str, str], reason: str
) -> None:
    world = World(given)

    world.answer(status)

    ((_, told),) = world.servers.unheard()
    assert re.search(reason, told)
    assert len(world.plane.registry) == 0


def test_a_server_that_registers_by_itself_too_is_there_once_and_is_not_static() -> None:
    world = World()
    world.answer()
    own = decode_to_router(world.process.body(30001, READY))
    assert isinstance(own, Registration)

    entry = world.plane.register(own, 0.0)
    world.answer()
    later = decode_to_router(world.process.body(30001, READY))
    assert isinstance(later, Registration)
    renewed = world.plane.renew(
        Renewal(
            version=1,
            server_id=own.server_id,
            boot_id=own.boot_id,
            lease_id=entry.lease_id,
            sent_at_s=0.0,
            report=later.report,
        ),
        1.0,
    )

    assert renewed is entry
    assert len(world.plane.registry) == 1
    assert world.servers.url_of("attn-30001") == ""
    assert world.servers.unheard() == ()


def test_a_server_that_registered_by_itself_first_keeps_its_own_lease() -> None:
    world = World()
    own = decode_to_router(world.process.body(30001, READY))
    assert isinstance(own, Registration)
    entry = world.plane.register(own, 0.0)

    world.answer()

    assert told(world.plane, own.server_id).lease_id == entry.lease_id
    assert (world.servers.url_of(own.server_id), world.servers.unheard()) == ("", ())


def test_an_mlp_server_is_taken_with_its_experts() -> None:
    world = World(Role.MLP)
    server = mlp("mlp-0")

    world.servers.on_answer(world.static, 200, encode(server.registration))
    register_all(world.plane, 0.0, attn("attn-0").attach(server))
    pass_probes(world.plane, 0.0)

    view = world.plane.groups.of("mlp-0")
    assert view is not None
    assert view.stands["mlp-0"].standing is Standing.SERVING
    assert [entry.server_id for entry in view.with_traffic()] == ["attn-0"]


def test_urls_that_come_and_go_are_told_to_whoever_asks_them() -> None:
    world = World()
    calls: list[int] = []
    world.servers.on_urls(lambda: calls.append(len(world.servers.all())))

    added = world.servers.add(Role.ATTN, "http://b:1")
    again = world.servers.add(Role.ATTN, "http://b:1")
    removed = world.servers.remove(URL)

    assert (added, again, removed) == (True, False, True)
    assert calls == [2, 1]


def test_an_older_report_changes_nothing() -> None:
    world = World()
    late = world.process.body(30001, {"role": "attn", "state": "stalled"})
    world.answer()
    pass_probes(world.plane, 0.0)

    world.servers.on_answer(world.static, 200, late)

    assert world.standing() is Standing.SERVING
    assert msgspec.json.decode(late)["report"]["seq"] == 1
