"""What the status page is shown: fleets as people meet them, made by the real control plane."""

from __future__ import annotations

from typing import Any

from page_fleet import FakeFleet, TrafficOf, busy
from router_servers import OTHER, FakeServer, attn, mlp, pass_probes, register_all, renew_all

from sgl_router_afd.api.shapes import GroupsAnswer
from sgl_router_afd.api.view import groups_answer
from sgl_router_afd.config import RouterConfig
from sgl_router_afd.control.ratio import Ratio
from sglang_afd.protocol.registration import Condition, PeerLoss

CONFIG = RouterConfig(ratio="2:1")
MODEL = "Qwen3-30B-A3B"


def answer_of(fleet: FakeFleet) -> GroupsAnswer:
    """As the router would answer now."""
    return groups_answer(fleet, CONFIG)


def empty() -> FakeFleet:
    """A router that nobody has spoken to."""
    return FakeFleet(clock_s=12.0)


class Ready:
    """Two attention servers on two MLP servers, all well and busy; `step` is one second."""

    def __init__(self) -> None:
        self.fleet = FakeFleet()
        self.experts = [mlp("mlp-0", 0, 2), mlp("mlp-1", 1, 2)]
        self.servers = [attn("attn-0", models=(MODEL,)), attn("attn-1", models=(MODEL,))]
        for server in self.servers:
            server.attach(*self.experts)
        register_all(self.fleet.plane, 0.0, *self.experts, *self.servers)
        pass_probes(self.fleet.plane, 0.0)

    def step(self) -> GroupsAnswer:
        """A second later, with other load."""
        self.fleet.clock_s += 1.0
        turn = int(self.fleet.clock_s)
        for index, server in enumerate(self.servers):
            running = 23 + 9 * index + turn * 7 % 11
            busy(
                server,
                running=running,
                waiting=turn * (index + 1) % 4,
                free_kv=6_200 - 190 * running // 2,
                tokens_per_s=41.3 * running,
            )
            self.fleet.traffics[server.id] = TrafficOf(
                num_in_flight=running + 1,
                num_served=2_140 + 37 * turn,
                num_failed=0,
                ttft_s=0.018 + 0.004 * (turn * 5 % 7),
            )
        busy(self.experts[0], imbalance=1.31 + 0.02 * (turn % 5))
        busy(self.experts[1], imbalance=1.74 + 0.03 * (turn % 4))
        renew_all(self.fleet.plane, self.fleet.clock_s, *self.experts, *self.servers)
        return answer_of(self.fleet)

    def answer_with(
        self, *, running: int, waiting: int, tokens_per_s: float, ttft_s: float
    ) -> GroupsAnswer:
        """With this load on both attention servers, at the same time as before."""
        for server in self.servers:
            busy(server, running=running, waiting=waiting, tokens_per_s=tokens_per_s)
            self.fleet.traffics[server.id] = TrafficOf(num_in_flight=running, ttft_s=ttft_s)
        renew_all(self.fleet.plane, self.fleet.clock_s, *self.servers)
        return answer_of(self.fleet)


def troubled() -> FakeFleet:
    """A group with a stalled, a waiting and a draining server, one with holes, and strays."""
    scene = Ready()
    scene.step()
    fleet, plane = scene.fleet, scene.fleet.plane
    plane.groups._ratio = Ratio(num_attn=4, num_mlp=1)
    late = attn("attn-2", models=(MODEL,)).says(reason="reads its weights")
    leaver = attn("attn-3", models=(MODEL,)).attach(*scene.experts)
    hole = mlp("mlp-big-0", 0, 4, fingerprint=OTHER)
    stranger = attn("attn-other", models=(MODEL,), fingerprint="ef" * 32)
    spare = mlp("mlp-spare", shard=None).says(condition=Condition.SPARE, reason="")
    newcomers = [late, leaver, hole, stranger, spare]
    register_all(plane, 2.0, *newcomers)
    pass_probes(plane, 2.0)
    plane.drain("attn-3", "an operator moves it to another rack", 3.0)
    loss = PeerLoss(boot_id=scene.experts[1].boot_id, reason="no heartbeat for 1.2 s")
    scene.servers[1].says(
        condition=Condition.STALLED,
        reason="waits for mlp-1 with 31 requests",
        attached=(scene.experts[0].boot_id,),
        lost=(loss,),
    )
    everybody = [*scene.experts, *scene.servers, *newcomers]
    renew_all(plane, 4.0, *everybody)
    fleet.never_heard = (
        ("http://10.0.0.7:30020", "connection refused; is the server started?"),
        ("http://10.0.0.8:30010", "a server of role mlp answers, and --attn names it"),
    )
    for now_s in range(6, 96, 3):
        fleet.clock_s = float(now_s)
        renew_all(plane, fleet.clock_s, *everybody)
    return fleet


def many(num_attn: int = 56, num_mlp: int = 8) -> FakeFleet:
    """One large group."""
    fleet = FakeFleet()
    experts = [mlp(f"mlp-{rank}", rank, num_mlp) for rank in range(num_mlp)]
    servers = [attn(f"attn-{index}", models=(MODEL,)) for index in range(num_attn)]
    for server in servers:
        busy(server.attach(*experts), running=11, tokens_per_s=300.0)
    register_all(fleet.plane, 0.0, *experts, *servers)
    pass_probes(fleet.plane, 0.0)
    return fleet


def hostile(text: str) -> FakeFleet:
    """Servers that say this text wherever they may."""
    fleet = FakeFleet()
    changes: dict[str, Any] = {"models": (text,)}
    expert = mlp("mlp-0", 0, 2)
    loss = PeerLoss(boot_id=expert.boot_id, reason=text)
    server: FakeServer = attn("attn-0", **changes).says(
        condition=Condition.STALLED, reason=text, lost=(loss,)
    )
    register_all(fleet.plane, 0.0, expert, server)
    fleet.never_heard = ((f"http://{text}", text),)
    return fleet
