from __future__ import annotations

import re

from router_fleet import RouterFleet, a_group
from router_servers import load_of, mlp

from sgl_router_afd.control.probe import Outcome
from sgl_router_afd.dataplane.counters import SERVED
from sgl_router_afd.metrics import render
from sglang_afd.config import Role


def values(fleet: RouterFleet) -> dict[str, float]:
    text = render(fleet.shared, fleet.fleet)
    rows = re.findall(r"^sgl_router_afd_(\S+) (\S+)$", text, re.MULTILINE)
    assert len(rows) == len({name for name, _ in rows}), "a name with the same labels twice"
    return {name: float(value) for name, value in rows}


def test_servers_are_named_by_url_with_what_they_report_and_what_this_router_has_there() -> None:
    fleet = RouterFleet()
    _, (server, _) = a_group(fleet, "attn-0", "attn-1")
    fleet.relay.add(SERVED + fleet.slot("attn-0"), 3)
    fleet.relay.add_first_token(fleet.slot("attn-0"), 0.25)
    server.says(load=load_of(num_running=5, num_waiting=2, free_kv_tokens=77))
    fleet.renew(server)
    fleet.loop.advance(0.5)

    shown = values(fleet)

    label = '{server="http://attn-0:30000"}'
    assert shown[f"server_served_requests_total{label}"] == 3
    assert shown[f"server_ttft_seconds{label}"] == 0.25
    assert shown[f"server_running_requests{label}"] == 5
    assert shown[f"server_waiting_requests{label}"] == 2
    assert shown[f"server_free_kv_tokens{label}"] == 77
    assert shown[f"server_ready{label}"] == 1
    assert shown['lease_age_seconds{server="http://attn-0:30000",role="attn"}'] == 0.5
    assert shown['lease_age_seconds{server="http://mlp-0:30000",role="mlp"}'] == 1.5
    assert 'server_ttft_seconds{server="http://attn-1:30000"}' not in shown


def test_a_group_has_one_state_its_epoch_and_its_servers() -> None:
    fleet = RouterFleet()
    a_group(fleet, "attn-0", "attn-1")

    shown = values(fleet)

    states = {name: value for name, value in shown.items() if name.startswith("group_state")}
    assert states.pop('group_state{group="group-1",state="ready"}') == 1
    assert len(states) == 5 and set(states.values()) == {0}
    assert shown['group_epoch{group="group-1"}'] == 3  # it grew with each of its servers
    assert shown['group_servers{group="group-1",role="attn"}'] == 2
    assert shown['group_servers{group="group-1",role="mlp"}'] == 1


def test_probes_events_and_servers_without_a_place_are_counted() -> None:
    fleet = RouterFleet()
    a_group(fleet, "attn-0")
    fleet.fleet.add_static("http://a:1", Role.ATTN)
    fleet.register(mlp("spare", shard=None))
    fleet.loop.advance(0.1)

    shown = values(fleet)

    assert shown[f'pair_probes_total{{outcome="{Outcome.PASSED}"}}'] == 1
    assert shown[f'pair_probes_total{{outcome="{Outcome.FAILED}"}}'] == 0
    assert shown["events_total"] == len(fleet.plane.events)
    assert (shown["unplaced_servers"], shown["unheard_servers"]) == (1, 1)


def test_a_server_that_left_is_in_no_metric() -> None:
    fleet = RouterFleet()
    a_group(fleet, "attn-0")

    fleet.loop.advance(100.0)

    assert not [name for name in values(fleet) if "http://" in name]
