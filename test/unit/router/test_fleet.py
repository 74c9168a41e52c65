"""The fleet with a clock that only tests move: what it publishes, probes and logs, and when."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from fake_registration import FakeRegistration
from router_fleet import RouterFleet as World
from router_fleet import a_group
from router_servers import TTL_S, FakeServer, attn, load_of, mlp

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.control import persist
from sgl_router_afd.control.events import MAX_SHOWN
from sgl_router_afd.control.ledger import Ledger
from sgl_router_afd.control.persist import Saved
from sgl_router_afd.control.probe import Outcome
from sgl_router_afd.control.routing import Candidates, Hold
from sgl_router_afd.dataplane.counters import IN_FLIGHT, MAX_SERVERS, SharedCounters
from sgl_router_afd.dataplane.messages import BrokeOff, Unreachable
from sgl_router_afd.fleet import COALESCE_S, Fleet
from sgl_router_afd.open_fleet import open_fleet
from sgl_router_afd.state_file import State, open_state
from sglang_afd.config import Role
from sglang_afd.errors import ConfigError


def test_before_anybody_registers_requests_may_wait() -> None:
    world = World()

    assert world.table.rows == () and world.table.models == {}
    assert world.table.unnamed.may_wait and world.table.unknown.may_wait


def test_a_group_that_is_proved_is_in_the_table_with_its_model_and_its_loads() -> None:
    world = World()

    servers = a_group(world, "attn-0", "attn-1")
    world.loop.advance(TTL_S - 1)
    world.renew(servers[0], *servers[1])
    world.loop.advance(1.0)

    assert world.states() == {"attn-0": "serving", "attn-1": "serving"}
    assert world.table.models["tiny"].slots == (0, 1) == world.table.unnamed.slots
    assert (world.table.unknown.slots, world.table.unknown.http_status) == ((), 404)
    assert world.table.unknown.reason == "there is no such model here; there is tiny"
    row = world.table.rows[0]
    assert (row.url, row.max_running, row.kv_tokens) == ("http://attn-0:30000", 64, 10_000)


def test_nobody_serves_before_its_pair_probe_has_passed() -> None:
    world = World(passes_probes=False)
    a_group(world, "attn-0")
    (probe,) = world.probes
    before = world.table.models["tiny"]

    world.fleet.on_probe_end(probe, Outcome.PASSED, "")
    world.loop.advance(0.1)

    assert (before.slots, before.may_wait) == ((), True)
    assert world.table.models["tiny"].slots == (0,)
    assert world.fleet.num_probes == {Outcome.PASSED: 1}


def test_a_probe_that_fails_is_made_again_by_the_clock_alone() -> None:
    world = World(passes_probes=False)
    a_group(world, "attn-0")
    world.fleet.on_probe_end(world.probes[0], Outcome.FAILED, "HTTP 500: oops")
    world.loop.advance(0.1)
    early = len(world.probes)

    world.loop.advance(1.0)

    assert (early, len(world.probes)) == (1, 2)
    assert "HTTP 500: oops" in world.table.rows[0].reason


def test_a_silent_server_loses_its_requests_by_the_clock_alone() -> None:
    world = World()
    a_group(world, "attn-0")

    world.loop.advance(TTL_S)

    assert world.states() == {"attn-0": "degraded"}
    assert "lease ran out" in world.table.rows[0].reason


def test_a_server_that_is_gone_leaves_the_table() -> None:
    world = World()
    a_group(world, "attn-0")

    world.loop.advance(2 * TTL_S + 1)

    assert world.table.rows == ()


def test_loads_that_come_shortly_after_a_table_make_one_more() -> None:
    world = World()
    _, servers = a_group(world, "attn-0", "attn-1", "attn-2", "attn-3")
    before = len(world.tables)

    for server in servers:
        server.says(load=load_of(num_running=5))
        world.renew(server)
        world.loop.advance(COALESCE_S / 10)
    world.loop.advance(COALESCE_S)

    assert len(world.tables) == before + 2
    assert [row.num_reported for row in world.table.rows] == [5] * 4


def test_a_decision_does_not_wait_for_loads() -> None:
    world = World()
    expert, (server, _) = a_group(world, "attn-0", "attn-1")
    server.says(load=load_of(num_running=5))
    world.renew(server)
    world.loop.advance(COALESCE_S / 10)
    world.renew(server)

    world.plane.drain("attn-1", "maintenance", world.loop.now_s)
    world.fleet.changed()
    world.loop.advance(COALESCE_S / 10)

    assert world.states() == {"attn-0": "serving", "attn-1": "draining"}
    assert expert.id == "mlp-0"


def test_servers_that_come_all_at_once_are_decided_on_together() -> None:
    world = World()
    servers = [one for i in range(20) for one in a_pair(i)]
    before = world.plane.num_decisions

    for server in servers:
        world.plane.register(server.next_registration(), world.loop.now_s)
        world.fleet.changed()
    world.loop.advance(1.0)

    assert set(world.states().values()) == {"serving"}
    # On all that came, and on all of whom the probes have passed.
    assert world.plane.num_decisions == before + 2


def a_pair(number: int) -> list[FakeServer]:
    expert = mlp(f"mlp-{number}")
    return [expert, attn(f"attn-{number}").attach(expert)]


def test_whoever_waits_for_a_decision_hears_of_it_once_it_is_made() -> None:
    world = World()
    heard: list[str] = []
    for server in a_pair(0):
        entry = world.plane.register(server.next_registration(), world.loop.now_s)
        world.fleet.when_decided(lambda entry=entry: heard.append(world.plane.lease(entry).group))
    before = list(heard)

    world.loop.advance()
    world.fleet.when_decided(lambda: heard.append("at once"))

    assert before == []
    assert heard == ["group-1", "group-1", "at once"]


def test_whoever_waits_for_a_decision_waits_no_more_when_the_fleet_closes() -> None:
    world = World()
    heard: list[str] = []
    world.plane.register(attn("attn-0").next_registration(), world.loop.now_s)
    world.fleet.when_decided(lambda: heard.append("closed"))

    world.fleet.close()
    world.fleet.when_decided(lambda: heard.append("later"))

    assert heard == ["closed", "later"]


def test_a_decision_rests_as_long_as_the_one_before_took() -> None:
    world = World()
    world.fleet._stopwatch = iter([0.0, 3.0, *[3.0] * 100]).__next__
    world.register(attn("attn-0"))
    world.loop.advance()
    first = world.plane.num_decisions

    world.plane.register(attn("attn-1").next_registration(), world.loop.now_s)
    world.fleet.changed()
    world.loop.advance(2.9)
    early = world.plane.num_decisions
    world.loop.advance(0.2)

    assert (early, world.plane.num_decisions) == (first, first + 1)


def test_all_that_happens_at_once_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sgl_router_afd.fleet")
    world = World()
    servers = [attn(f"attn-{i}") for i in range(2 * MAX_SHOWN)]

    for server in servers:
        world.plane.register(server.next_registration(), world.loop.now_s)
    world.fleet.changed()
    world.loop.advance(0.1)

    said = [record.message for record in caplog.records if " registered, " in record.message]
    assert len(said) == len(servers) == world.fleet.num_events
    assert len(world.plane.events) == MAX_SHOWN


def test_a_report_that_says_nothing_new_makes_no_table() -> None:
    world = World()
    expert, servers = a_group(world, "attn-0")
    before = len(world.tables)

    world.renew(expert, *servers)
    world.loop.advance(1.0)

    assert len(world.tables) == before


def test_what_was_in_flight_when_a_report_came_is_in_the_table() -> None:
    world = World()
    _, (server, _) = a_group(world, "attn-0", "attn-1")
    world.relay.add(IN_FLIGHT + world.slot("attn-0"), 3)
    server.says(load=load_of(num_running=3))

    world.renew(server)
    world.relay.add(IN_FLIGHT + world.slot("attn-0"), 4)
    world.loop.advance(1.0)

    row = world.table.rows[0]
    assert (row.num_reported, row.num_in_flight_then) == (3, 3)
    assert world.fleet.traffic("attn-0").num_in_flight == 7
    assert world.fleet.num_requests_in_flight() == 7
    assert world.fleet.num_in_flight_then("attn-0") == 3


def test_a_server_that_refuses_a_relays_connection_gets_nothing_until_it_is_proved_again() -> None:
    world = World(passes_probes=False)
    a_group(world, "attn-0", "attn-1")
    for probe in list(world.probes):
        world.fleet.on_probe_end(probe, Outcome.PASSED, "")
    world.loop.advance(0.1)

    world.fleet.on_trouble(Unreachable(slot=world.slot("attn-1"), reason="connection refused"))
    world.loop.advance(0.1)
    refused = world.states()
    world.fleet.on_probe_end(world.probes[-1], Outcome.PASSED, "")
    world.loop.advance(0.1)

    assert refused == {"attn-0": "serving", "attn-1": "degraded"}
    assert world.states() == {"attn-0": "serving", "attn-1": "serving"}


def test_an_answer_that_broke_off_asks_for_a_probe_and_takes_nothing_away() -> None:
    world = World(passes_probes=False)
    a_group(world, "attn-0")
    world.fleet.on_probe_end(world.probes[0], Outcome.PASSED, "")
    world.loop.advance(0.1)

    world.fleet.on_trouble(BrokeOff(slot=0, reason="closed"))
    world.loop.advance(0.1)

    assert len(world.probes) == 2
    assert world.states() == {"attn-0": "serving"}


def test_trouble_of_a_slot_that_nobody_has_is_nothing() -> None:
    world = World()

    world.fleet.on_trouble(Unreachable(slot=MAX_SERVERS - 1, reason="connection refused"))

    assert world.table.rows == ()


def test_what_happens_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sgl_router_afd.fleet")
    world = World()

    a_group(world, "attn-0")
    world.fleet.changed()
    world.loop.advance(1.0)

    texts = [record.message for record in caplog.records]
    assert texts.count("group-1 is ready: 1 of 1 attention servers serve") == 1
    assert texts[0].startswith("mlp-0 registered")
    assert world.fleet.num_events == len(texts)


def test_what_servers_and_operators_say_forges_no_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "sgl_router_afd.fleet")
    world = World(passes_probes=False)
    a_group(world, "attn-0")

    world.fleet.on_probe_end(world.probes[0], Outcome.FAILED, "HTTP 500: \x1b[2J\nforged")
    world.plane.drain("attn-0", "upgrade\nforged", world.loop.now_s)
    world.fleet.changed()
    world.loop.advance(1.0)

    assert not [record for record in caplog.records if "\n" in record.message]
    assert "HTTP 500: ?[2J?forged" in caplog.text and "drains: upgrade?forged" in caplog.text


def test_where_epochs_cannot_be_saved_all_stays_as_it_is_until_they_can(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_full = False

    def save(saved: Saved) -> None:
        if is_full:
            raise ConfigError("--state-file /x cannot be written: no space left")

    world = World(Ledger(Saved(), save))
    a_group(world, "attn-0")

    is_full = True
    other = attn("attn-1").attach(mlp("mlp-0"))
    world.register(other)
    world.loop.advance(2.0)
    full = world.states()
    is_full = False
    world.loop.advance(2.0)

    assert full == {"attn-0": "serving", "attn-1": "unplaced"}
    assert caplog.text.count("groups stay as they are: --state-file /x cannot be written") == 1
    assert world.states() == {"attn-0": "serving", "attn-1": "serving"}


def test_whoever_left_or_was_restarted_gets_nothing_while_groups_stay_as_they_are() -> None:
    is_full = False

    def save(saved: Saved) -> None:
        if is_full:
            raise ConfigError("--state-file /x cannot be written: no space left")

    world = World(Ledger(Saved(), save))
    expert, servers = a_group(world, "attn-0", "attn-1", "attn-2")
    is_full = True

    world.plane.remove("attn-0", world.loop.now_s)
    world.register(servers[1].restarted("attn-1.boot-2").attach(expert))
    world.loop.advance(0.1)
    some = world.plane.route("tiny")
    world.plane.remove("attn-2", world.loop.now_s)
    world.fleet.changed()
    world.loop.advance(0.1)

    assert some == Candidates(server_ids=("attn-2",))
    assert isinstance(world.plane.route("tiny"), Hold)
    assert (world.table.models["tiny"].slots, world.table.models["tiny"].may_wait) == ((), True)


def test_a_probe_of_a_server_that_left_is_not_looked_for_again_and_again() -> None:
    num_saves = 0

    def save(saved: Saved) -> None:
        nonlocal num_saves
        num_saves += 1
        if is_full:
            raise ConfigError("--state-file /x cannot be written: no space left")

    is_full = False
    world = World(Ledger(Saved(), save), passes_probes=False)
    a_group(world, "attn-0")
    world.fleet.on_probe_end(world.probes[0], Outcome.FAILED, "HTTP 500")
    is_full, num_saves = True, 0

    world.plane.remove("attn-0", world.loop.now_s)
    world.fleet.changed()
    world.loop.advance(10.0)

    assert num_saves <= 12  # once a second, and when the probe was due


def test_a_router_goes_on_with_what_the_one_before_it_saved(tmp_path: Path) -> None:
    config = RouterConfig(state_file=str(tmp_path / "state"))
    expert = mlp("mlp-0")
    server = attn("attn-0").attach(expert)

    async def run_router(state: State, *servers: FakeServer) -> Fleet:
        fleet = open_fleet(config, SharedCounters.create(1), state.ledger)
        for one in servers:
            one.register(fleet.plane, fleet.now_s())
        fleet.close()
        return fleet

    with open_state(config.state_file) as state:
        before = asyncio.run(run_router(state, expert, server))
        before.plane.drain("attn-0", "new kernel", before.now_s())
    expert.lease = server.lease = None

    with open_state(config.state_file) as state:
        after = asyncio.run(run_router(state, server, expert))

    (view,) = after.plane.groups.views.values()
    assert (view.name, view.epoch > before.plane.groups.views["group-1"].epoch) == ("group-1", True)
    assert view.stands["attn-0"].reason == "new kernel"


def test_an_epoch_is_in_the_file_before_a_server_or_a_table_tells_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    world = World(Ledger(Saved(), lambda saved: persist.save(path, saved)))
    server = mlp("mlp-0")

    lease = server.register(world.plane, world.loop.now_s)

    assert lease.epoch == 1
    assert persist.load(path).groups == {lease.group: 1}


def test_static_urls_are_told_with_their_roles_and_why_they_are_not_there() -> None:
    world = World()

    world.fleet.add_static("http://a:1", Role.ATTN)
    world.fleet.add_static("http://b:1", Role.MLP)
    world.fleet.static.on_refusal(world.fleet.static.all()[0], "connection refused")
    world.loop.advance(1.0)

    assert world.fleet.statics() == (("http://a:1", Role.ATTN), ("http://b:1", Role.MLP))
    assert world.fleet.unheard() == (
        ("http://a:1", "connection refused"),
        ("http://b:1", "not asked yet"),
    )
    assert "http://a:1: connection refused" in world.table.unnamed.reason


def test_a_static_server_that_is_removed_leaves_and_stays_away() -> None:
    world = World()
    world.fleet.add_static("http://127.0.0.1:1", Role.ATTN)
    static = world.fleet.static.all()[0]
    body = FakeRegistration().body(1, {"role": "attn", "state": "ready"})
    world.fleet.static.on_answer(static, 200, body)
    world.loop.advance(1.0)
    before = (world.states(), world.fleet.is_static("attn-1"))

    was_asked = world.fleet.remove_static("http://127.0.0.1:1")
    world.loop.advance(1.0)

    assert before == ({"attn-1": "serving"}, True)
    assert was_asked and not world.fleet.remove_static("http://127.0.0.1:1")
    assert (world.table.rows, world.fleet.statics()) == ((), ())


def test_a_closed_fleet_publishes_and_probes_nothing_more() -> None:
    world = World()
    a_group(world, "attn-0")
    before = (len(world.tables), len(world.probes))

    world.fleet.close()
    world.fleet.changed()
    world.loop.advance(100.0)

    assert (len(world.tables), len(world.probes)) == before
