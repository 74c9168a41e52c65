"""What the control plane does for one server is little, however many there are.

Lines are counted, since a clock would only tell how busy the machine is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from router_servers import FakeServer, a_plane, attn, load_of, mlp

from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.static_servers import StaticServers
from sglang_afd.config import Role
from sglang_afd.protocol.registration import PeerLoss, Renewal, encode

FEW, MANY = 80, 640

TraceFunction = Callable[[FrameType, str, object], object]


def num_lines(do: Callable[..., object], *args: object) -> int:
    """How many lines of Python run meanwhile; each turn of a loop runs some."""
    count = 0

    def see(frame: FrameType, event: str, arg: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        return see

    before = sys.gettrace()
    sys.settrace(see)
    try:
        do(*args)
    finally:
        sys.settrace(before)
    return count


def fleet(num_servers: int) -> list[FakeServer]:
    """Groups of one MLP and seven attention servers."""
    servers: list[FakeServer] = []
    for index in range(num_servers // 8):
        expert = mlp(f"mlp-{index}")
        servers += [expert, *(attn(f"attn-{index}-{i}").attach(expert) for i in range(7))]
    return servers


def registered(num_servers: int) -> tuple[ControlPlane, list[FakeServer]]:
    plane, servers = a_plane(), fleet(num_servers)
    for server in servers:
        server.lease = None
        register(plane, server)
    plane.update(0.0)
    for server in servers:
        entry = plane.registry.get(server.id)
        assert entry is not None
        server.lease = plane.lease(entry)
    return plane, servers


def register(plane: ControlPlane, server: FakeServer) -> None:
    plane.register(server.next_registration(), 0.0)


def renew(plane: ControlPlane, renewal: Renewal) -> None:
    plane.lease(plane.renew(renewal, 1.0))


def test_a_registration_costs_the_same_however_many_servers_there_are() -> None:
    costs = []
    for num_servers in (FEW, MANY):
        plane, _ = registered(num_servers)
        new = attn("attn-new")
        costs.append(num_lines(register, plane, new))

    assert costs[0] == costs[1]


def test_a_renewal_costs_the_same_however_many_servers_there_are() -> None:
    costs = []
    for num_servers in (FEW, MANY):
        plane, servers = registered(num_servers)
        renewal = servers[-1].says(load=load_of(num_running=3)).renewal()
        costs.append(num_lines(renew, plane, renewal))
        assert not plane.is_undecided

    assert costs[0] == costs[1]


def test_a_decision_costs_as_much_for_each_server_however_many_there_are() -> None:
    costs = []
    for num_servers in (FEW, MANY):
        plane, _ = registered(num_servers)
        costs.append(num_lines(plane.update, 1.0) / num_servers)

    assert costs[1] < 1.2 * costs[0]


def test_a_first_decision_on_all_costs_as_much_for_each_however_many_there_are() -> None:
    costs = []
    for num_servers in (FEW, MANY):
        plane = a_plane()
        for server in fleet(num_servers):
            register(plane, server)
        costs.append(num_lines(plane.update, 0.0) / num_servers)

    assert costs[1] < 1.2 * costs[0]


def test_a_first_decision_on_servers_without_a_place_costs_as_much_for_each() -> None:
    costs = []
    for num_servers in (FEW, MANY):
        plane = a_plane()
        for index in range(num_servers // 4):
            register(plane, mlp(f"mlp-{index}", index % 2, 2))
            for i in range(3):
                register(plane, attn(f"attn-{index}-{i}"))
        costs.append(num_lines(plane.update, 0.0) / num_servers)

    assert costs[1] < 1.2 * costs[0]


def test_a_report_of_a_lost_peer_costs_the_same_however_many_servers_there_are() -> None:
    costs = []
    for num_servers in (FEW, MANY):
        plane, servers = registered(num_servers)
        loss = PeerLoss(boot_id="nobody", reason="silent for 1 s")
        costs.append(num_lines(renew, plane, servers[-1].says(lost=(loss,)).renewal()))

    assert costs[0] == costs[1]


def test_whether_the_router_asks_a_server_costs_the_same_however_many_it_asks() -> None:
    costs = []
    for num_servers in (FEW, MANY):
        plane = a_plane()
        statics = StaticServers(plane, lambda: 0.0, lambda: None)
        for index in range(num_servers):
            statics.add(Role.MLP, f"http://mlp-{index}:30000")
            static, server = statics.all()[-1], mlp(f"mlp-{index}")
            statics.on_answer(static, 200, encode(server.next_registration()))
        costs.append(num_lines(statics.url_of, f"mlp-{num_servers - 1}"))
        assert statics.url_of(f"mlp-{num_servers - 1}") == f"http://mlp-{num_servers - 1}:30000"

    assert costs[0] == costs[1]
