"""What the control plane does for one server is little, however many there are.

Lines are counted, since a clock would only tell how busy the machine is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from router_servers import FakeServer, a_plane, attn, load_of, mlp

from sgl_router_afd.control.plane import ControlPlane
from sglang_afd.protocol.registration import Renewal

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
