"""Servers as they speak to the router's control plane, with a clock that only tests move."""

from __future__ import annotations

from typing import Any

import msgspec

from sgl_router_afd.control.ledger import Ledger
from sgl_router_afd.control.persist import Saved
from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.probe import Outcome
from sgl_router_afd.control.ratio import Ratio
from sgl_router_afd.control.registry import LeaseTerms
from sglang_afd.config import Role
from sglang_afd.protocol.registration import (
    REGISTRATION_VERSION,
    Capacity,
    Condition,
    Lease,
    Leave,
    Load,
    Registration,
    Renewal,
    Report,
    Shard,
)

FINGERPRINT = "ab" * 32
OTHER = "cd" * 32
EXPERTS = 8
RENEW_S = LeaseTerms().renew_s
TTL_S = LeaseTerms().ttl_s
GONE_S = LeaseTerms().ttl_s + LeaseTerms().grace_s


class FakeServer:
    """One server process; renew it as often as it would."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.report = registration.report
        self.lease: Lease | None = None
        self.sent_at_s = registration.sent_at_s  # of the last message

    @property
    def id(self) -> str:
        return self.registration.server_id

    @property
    def boot_id(self) -> str:
        return self.registration.boot_id

    def says(self, **changes: Any) -> FakeServer:
        """Change what the next report says; returns the server."""
        self.report = msgspec.structs.replace(self.report, **changes)
        return self

    def attach(self, *mlp: FakeServer) -> FakeServer:
        """As an attention server that has attached to these."""
        return self.says(
            condition=Condition.READY, reason="", attached=tuple(one.boot_id for one in mlp)
        )

    def register(self, plane: ControlPlane, now_s: float) -> Lease:
        entry = plane.register(self.next_registration(), now_s)
        plane.update(now_s)
        self.lease = plane.lease(entry)
        return self.lease

    def next_registration(self) -> Registration:
        """With a fresh report, and what the last lease said."""
        lease = self.lease
        group, epoch = (lease.group, lease.epoch) if lease is not None else ("", 0)
        self.registration = msgspec.structs.replace(
            self.registration,
            group=group,
            epoch=epoch,
            report=self._next_report(),
            sent_at_s=self._stamp(),
        )
        return self.registration

    def renew(self, plane: ControlPlane, now_s: float) -> Lease:
        entry = plane.renew(self.renewal(), now_s)
        settle(plane, now_s)
        self.lease = plane.lease(entry)
        return self.lease

    def leave(self, plane: ControlPlane, now_s: float) -> None:
        plane.leave(self.leaving(), now_s)
        plane.update(now_s)

    def renewal(self) -> Renewal:
        return Renewal(
            version=REGISTRATION_VERSION,
            server_id=self.id,
            boot_id=self.boot_id,
            lease_id=self.lease.lease_id if self.lease is not None else "none",
            sent_at_s=self._stamp(),
            report=self._next_report(),
        )

    def leaving(self) -> Leave:
        lease_id = self.lease.lease_id if self.lease is not None else "none"
        return Leave(
            version=REGISTRATION_VERSION,
            server_id=self.id,
            boot_id=self.boot_id,
            lease_id=lease_id,
            sent_at_s=self._stamp(),
        )

    def restarted(self, boot_id: str) -> FakeServer:
        """A later process of the same server, which remembers nothing."""
        return FakeServer(
            msgspec.structs.replace(
                self.registration,
                boot_id=boot_id,
                started_at_s=self.registration.started_at_s + 1,
                group="",
                epoch=0,
                report=msgspec.structs.replace(
                    self.report, seq=0, attached=(), lost=(), is_draining=False
                ),
            )
        )

    def _stamp(self) -> float:
        self.sent_at_s += 0.001
        return self.sent_at_s

    def _next_report(self) -> Report:
        self.says(seq=self.report.seq + 1)
        return self.report


def load_of(*, num_running: int = 0, num_waiting: int = 0, free_kv_tokens: int = 0) -> Load:
    """The load of a server, as far as the router decides by it."""
    return Load(
        num_running=num_running,
        num_waiting=num_waiting,
        free_kv_tokens=free_kv_tokens,
        tokens_per_s=0.0,
        expert_imbalance=0.0,
    )


def attn(name: str, **changes: Any) -> FakeServer:
    """An attention server that has just started."""
    return FakeServer(_registration(name, Role.ATTN, Condition.STARTING, changes))


def mlp(name: str, rank: int = 0, ep_size: int = 1, **changes: Any) -> FakeServer:
    """An MLP server that serves."""
    width = EXPERTS // ep_size
    shard = Shard(
        ep_rank=rank,
        ep_size=ep_size,
        first_expert=rank * width,
        stop_expert=(rank + 1) * width,
    )
    changes = {"shard": shard, "exchange_address": f"tcp://{name}:7000"} | changes
    return FakeServer(_registration(name, Role.MLP, Condition.READY, changes))


def a_plane(
    last: Saved | None = None, ratio: Ratio | None = None, *, saved: list[Saved] | None = None
) -> ControlPlane:
    """A control plane that began at 0 with what was saved last; what it saves goes to `saved`."""
    keep = saved if saved is not None else []
    ledger = Ledger(last or Saved(), keep.append)
    return ControlPlane("router", ledger, started_s=0.0, ratio=ratio)


def settle(plane: ControlPlane, now_s: float) -> None:
    """Decide what is not decided yet, as a fleet does a moment after each message."""
    if plane.is_undecided:
        plane.update(now_s)


def told(plane: ControlPlane, server_id: str) -> Lease:
    """What a server would be told now."""
    entry = plane.registry.get(server_id)
    assert entry is not None, f"{server_id} is not there"
    return plane.lease(entry)


def register_all(plane: ControlPlane, now_s: float, *servers: FakeServer) -> None:
    for server in servers:
        server.register(plane, now_s)


def renew_all(plane: ControlPlane, now_s: float, *servers: FakeServer) -> None:
    for server in servers:
        server.renew(plane, now_s)


def pass_probes(plane: ControlPlane, now_s: float) -> list[str]:
    """Make the probes that are due, all of which pass; returns whom they were made of."""
    probes = plane.start_probes(now_s)
    for probe in probes:
        plane.end_probe(probe, Outcome.PASSED, "", now_s)
    settle(plane, now_s)
    return [probe.server_id for probe in probes]


def _registration(
    name: str, role: Role, condition: Condition, changes: dict[str, Any]
) -> Registration:
    fields: dict[str, Any] = {
        "version": REGISTRATION_VERSION,
        "server_id": name,
        "boot_id": f"{name}.boot-1",
        "started_at_s": 1000.0,
        "sent_at_s": 1000.0,
        "role": role,
        "models": ("tiny",) if role is Role.ATTN else (),
        "fingerprint": FINGERPRINT,
        "num_experts": EXPERTS,
        "url": f"http://{name}:30000",
        "exchange_address": "",
        "shard": None,
        "peer_urls": (),
        "capacity": Capacity(max_running_requests=64, kv_tokens=10_000),
        "group": "",
        "epoch": 0,
        "report": Report(
            seq=0,
            condition=condition,
            reason="",
            attached=(),
            lost=(),
            load=load_of(free_kv_tokens=10_000),
            is_draining=False,
        ),
    }
    return Registration(**(fields | changes))
