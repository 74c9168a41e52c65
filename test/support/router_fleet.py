"""A fleet of the router with a clock that only tests move, and probes that wait for the test."""

from __future__ import annotations

from fake_loop import FakeLoop
from router_servers import FakeServer, attn, mlp

from sgl_router_afd.control.ledger import Ledger
from sgl_router_afd.control.persist import Saved
from sgl_router_afd.control.plane import ControlPlane, Probe
from sgl_router_afd.control.probe import Outcome
from sgl_router_afd.dataplane.counters import RelayCounters, SharedCounters
from sgl_router_afd.dataplane.messages import Table
from sgl_router_afd.fleet import Fleet
from sgl_router_afd.traffic import TrafficBook


class RouterFleet:
    """A fleet, what it publishes and what it probes.

    Args:
        ledger: What outlives it.
        passes_probes: Whether every probe passes by itself, a moment later.
    """

    def __init__(self, ledger: Ledger | None = None, *, passes_probes: bool = True) -> None:
        self.loop = FakeLoop(now_s=1000.0)
        self.shared = SharedCounters.create(1)
        self.relay = RelayCounters(self.shared, 0)
        self.book = TrafficBook(self.shared, self.loop.time)
        self.plane = ControlPlane(
            "router",
            ledger or Ledger(Saved(), lambda saved: None),
            started_s=self.loop.now_s,
            num_in_flight=self.book.num_in_flight,
        )
        self.fleet = Fleet(
            self.plane,
            self.book,
            self.shared,
            boot_id="router",
            clock=self.loop.time,
            call_later=self.loop.call_later,
            stopwatch=self.loop.time,
        )
        self.tables: list[Table] = []
        self.probes: list[Probe] = []
        self.passes_probes = passes_probes
        self.fleet.publish_to(self.tables.append)
        self.fleet.probe_with(self._probe)

    @property
    def table(self) -> Table:
        return self.tables[-1]

    def states(self) -> dict[str, str]:
        return {row.server_id: row.state for row in self.table.rows}

    def register(self, *servers: FakeServer) -> None:
        for server in servers:
            server.register(self.plane, self.loop.now_s)
        self.fleet.changed()

    def renew(self, *servers: FakeServer) -> None:
        for server in servers:
            server.renew(self.plane, self.loop.now_s)
        self.fleet.changed()

    def slot(self, server_id: str) -> int:
        return next(row.slot for row in self.table.rows if row.server_id == server_id)

    def _probe(self, probe: Probe) -> None:
        self.probes.append(probe)
        if self.passes_probes:
            self.loop.call_later(0.001, lambda: self.fleet.on_probe_end(probe, Outcome.PASSED, ""))


def a_group(fleet: RouterFleet, *names: str) -> tuple[FakeServer, list[FakeServer]]:
    """One MLP server and attention servers, all well."""
    expert = mlp("mlp-0")
    servers = [attn(name).attach(expert) for name in names]
    fleet.register(expert, *servers)
    fleet.loop.advance(1.0)
    return expert, servers
