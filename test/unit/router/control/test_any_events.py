"""Whatever happens, in whatever order: what must hold of the control plane always."""

from __future__ import annotations

import contextlib
import random

import pytest
from router_servers import OTHER, TTL_S, FakeServer, attn, load_of, mlp

from sgl_router_afd.control.ledger import FORGET_S, Ledger
from sgl_router_afd.control.persist import Saved
from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.probe import Outcome
from sgl_router_afd.control.ratio import Ratio
from sgl_router_afd.control.routing import Candidates
from sgl_router_afd.control.standing import GroupState
from sglang_afd.config import Role
from sglang_afd.errors import ConfigError, Refused
from sglang_afd.protocol.registration import Condition

STEPS = 150
LOST = (Condition.STALLED, Condition.DETACHED)


def fleet() -> list[FakeServer]:
    """Two models; one of them with two groups, of which one has two ranks."""
    return [
        *(mlp(f"x-{rank}", rank, 2, peer_urls=_leader("x-0") if rank else ()) for rank in (0, 1)),
        mlp("y-0"),
        mlp("z-0", fingerprint=OTHER),
        mlp("spare", shard=None).says(condition=Condition.SPARE),
        *(attn(f"a-{index}") for index in range(5)),
        *(attn(f"b-{index}", fingerprint=OTHER, models=("big",)) for index in range(2)),
        attn("clash", fingerprint=OTHER),
        attn("own", peer_urls=("http://elsewhere:30010",)),
    ]


def _leader(name: str) -> tuple[str, ...]:
    return (f"http://{name}:30000",)


class World:
    """Servers that live and die, a router that is restarted, and all that was promised."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.saved = [Saved()]
        self.is_full = False  # the disk
        self.drained: dict[str, str] = {}  # the process of each server that was asked to drain
        self.now_s = 0.0
        self.ratio = self.rng.choice([None, Ratio(num_attn=2, num_mlp=1)])
        self.servers = fleet()
        self.dead: set[str] = set()
        self.epochs: dict[str, int] = {}  # the largest that anybody was told
        self.num_boots = 1
        self.start_router()

    def start_router(self) -> None:
        if self.is_full:
            self.drained.clear()  # nobody could save what was asked since then
            self.is_full = False
        ledger = Ledger(self.saved[-1], self.save)
        self.plane = ControlPlane("router", ledger, started_s=0.0, ratio=self.ratio)
        self.now_s = 0.0  # each process has a clock of its own

    def save(self, now: Saved) -> None:
        if self.is_full:
            raise ConfigError("no space left")
        self.saved.append(now)

    def step(self) -> None:
        self.now_s += self.rng.choice([0.0, 0.1, 0.5, 2.0])
        server = self.rng.choice(self.servers)
        actions = {
            self.renew: 50,
            self.probe: 12,
            self.attach: 12,
            self.stall: 6,
            self.die_or_live: 4,
            self.restart: 4,
            self.drain: 3,
            self.drain_group: 2,
            self.wait: 2,
            self.restart_router: 2,
            self.leave: 3,
            self.remove: 2,
            self.fill_or_free_disk: 2,
        }
        [action] = self.rng.choices(list(actions), list(actions.values()))
        action(server)
        if not self.plane.is_undecided or self.rng.random() < 0.8:  # else with what comes next
            self.plane.update(self.now_s)

    def die_or_live(self, server: FakeServer) -> None:
        self.dead ^= {server.id}

    def drain(self, server: FakeServer) -> None:
        reason = self.rng.choice(["", "an operator asked"])
        if self.plane.drain(server.id, reason, self.now_s):
            self.drained.pop(server.id, None)
            if reason:
                self.drained[server.id] = self.process(server.id)

    def process(self, server_id: str) -> str:
        entry = self.plane.registry.get(server_id)
        return "" if entry is None else entry.boot_id

    def drain_group(self, server: FakeServer) -> None:
        self.plane.drain_group("group-1", self.rng.choice(["", "maintenance"]), self.now_s)

    def take_drains_back(self) -> None:
        self.plane.drain_group("group-1", "", self.now_s)
        self.drained.clear()
        for entry in self.plane.registry:
            self.plane.drain(entry.server_id, "", self.now_s)

    def wait(self, server: FakeServer) -> None:
        wait_s = self.rng.choice([5.0, TTL_S + 1, 3 * TTL_S, 700.0])
        self.now_s += wait_s
        if wait_s > FORGET_S:
            self.drained.clear()

    def restart_router(self, server: FakeServer) -> None:
        self.start_router()

    def leave(self, server: FakeServer) -> None:
        with contextlib.suppress(Refused):
            server.leave(self.plane, self.now_s)
            self.drained.pop(server.id, None)

    def remove(self, server: FakeServer) -> None:
        if self.plane.remove(server.id, self.now_s):
            self.drained.pop(server.id, None)

    def fill_or_free_disk(self, server: FakeServer) -> None:
        self.is_full = not self.is_full

    def renew(self, server: FakeServer) -> None:
        if server.id in self.dead:
            return
        server.says(load=load_of(num_running=self.rng.randint(0, 9), free_kv_tokens=9))
        try:
            if server.lease is None:
                raise Refused("", "")
            lease = server.renew(self.plane, self.now_s)
        except Refused:
            lease = server.register(self.plane, self.now_s)
        if lease.group:
            assert lease.epoch >= self.epochs.get(lease.group, 0), "an epoch went back"
            self.epochs[lease.group] = lease.epoch

    def attach(self, server: FakeServer) -> None:
        if server.registration.role is not Role.ATTN:
            return
        view = self.plane.groups.of(server.id)
        group = view.group if view is not None else None
        boots = [entry.boot_id for entry in group.mlp.values()] if group is not None else []
        server.says(condition=Condition.READY, reason="", attached=tuple(boots))
        self.renew(server)

    def stall(self, server: FakeServer) -> None:
        if server.registration.role is Role.ATTN:
            server.says(condition=self.rng.choice(LOST), reason="gone", attached=())
            self.renew(server)

    def restart(self, server: FakeServer) -> None:
        self.num_boots += 1
        index = self.servers.index(server)
        self.servers[index] = server.restarted(f"{server.id}.boot-{self.num_boots}")
        if server.registration.role is Role.ATTN:
            self.servers[index].says(condition=Condition.STARTING)

    def probe(self, server: FakeServer) -> None:
        for server_id in self.plane.probes.due(self.now_s):
            attachment = self.plane.probes.on_started(server_id, self.now_s)
            outcome = self.rng.choice([Outcome.PASSED, *Outcome])
            self.plane.probes.on_outcome(server_id, outcome, "", self.now_s, attachment)

    def check(self) -> None:
        if self.plane.is_undecided:
            return
        self.check_traffic()
        self.check_places()
        self.check_reasons()
        self.check_drains()

    def check_traffic(self) -> None:
        for model, fingerprint in (("tiny", None), ("big", OTHER)):
            found = self.plane.route(model)
            for server_id in found.server_ids if isinstance(found, Candidates) else ():
                entry, view = self.plane.registry.get(server_id), self.plane.groups.of(server_id)
                assert entry is not None and view is not None
                assert entry.registration.role is Role.ATTN
                assert view.stand.state is GroupState.READY
                assert entry.report.condition is Condition.READY
                assert entry.is_here(self.now_s) and not entry.is_draining
                assert model in entry.registration.models
                assert fingerprint in (None, entry.registration.fingerprint)
                if not view.group.wires_itself and not self.plane.trouble:
                    ranks = {one.boot_id for one in view.group.mlp.values()}
                    assert set(entry.report.attached) == ranks
                    assert len(ranks) == view.group.shape.ep_size

    def check_places(self) -> None:
        placed = [name for view in self.plane.groups.views.values() for name in view.stands]
        homeless = self.plane.groups.homeless
        registered = sorted(entry.server_id for entry in self.plane.registry)
        assert len(placed) == len(set(placed)), "a server is in two groups"
        if not self.plane.trouble:
            assert sorted([*placed, *homeless]) == registered
        for view in self.plane.groups.views.values():
            prints = {entry.registration.fingerprint for entry in view.group.servers()}
            assert prints <= {view.group.shape.fingerprint}

    def check_reasons(self) -> None:
        assert all(self.plane.groups.homeless.values())
        assert bool(self.plane.trouble) <= self.is_full, "why are groups kept?"
        for view in self.plane.groups.views.values():
            assert view.stand.reason
            assert view.epoch >= self.epochs.get(view.name, 0)
            assert self.saved[-1].groups[view.name] == view.epoch

    def check_drains(self) -> None:
        for server_id, boot_id in self.drained.items():
            entry = self.plane.registry.get(server_id)
            if entry is not None and entry.boot_id == boot_id:
                assert entry.is_draining, f"{server_id} was asked to drain"


@pytest.mark.parametrize("seed", range(40))
def test_what_must_hold_holds_whatever_happens(seed: int) -> None:
    world = World(seed)

    for _ in range(STEPS):
        world.step()
        world.check()


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happened_servers_that_are_well_for_a_while_all_serve(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.dead.clear()
    world.is_full = False

    for _ in range(60):  # two minutes: longer than any probation, and than lapses count
        world.now_s += 2.0
        for server in world.servers:
            world.attach(server)
            world.renew(server)
        world.take_drains_back()
        for server_id in world.plane.probes.due(world.now_s):
            attachment = world.plane.probes.on_started(server_id, world.now_s)
            world.plane.probes.on_outcome(server_id, Outcome.PASSED, "", world.now_s, attachment)
        world.plane.update(world.now_s)

    found = [world.plane.route(model) for model in ("tiny", "big")]
    serving = {name for one in found if isinstance(one, Candidates) for name in one.server_ids}
    # "clash" and the b servers, or "own" and the a servers, may exclude one another.
    assert {f"a-{index}" for index in range(5)} | {"b-0", "b-1"} <= serving | _excluded(world)
    assert world.plane.groups.homeless["spare"].startswith("a spare")


def _excluded(world: World) -> set[str]:
    """Servers that say a name that another model had first."""
    return {
        name
        for name, reason in world.plane.groups.homeless.items()
        if "another --served-model-name" in reason
    }


def test_a_world_really_reaches_every_state() -> None:
    seen: set[GroupState] = set()

    for seed in range(20):
        world = World(seed)
        for _ in range(STEPS):
            world.step()
            seen |= {view.stand.state for view in world.plane.groups.views.values()}

    assert seen == set(GroupState)
