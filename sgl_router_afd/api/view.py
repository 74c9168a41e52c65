"""Everything that the router knows, as the structs that people and programs read (pure)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sgl_router_afd.api.shapes import (
    UNPLACED,
    VERSION,
    EventView,
    GroupsAnswer,
    GroupView,
    Lost,
    PlacedServer,
    RouterView,
    ServersAnswer,
    ServerView,
    Unheard,
)
from sgl_router_afd.config import RouterConfig
from sgl_router_afd.control.groups import View
from sgl_router_afd.control.registry import Entry
from sgl_router_afd.fleet import Fleet
from sglang_afd import __version__

Stand = tuple[str, str]  # a standing and its reason


def groups_answer(fleet: Fleet, config: RouterConfig) -> GroupsAnswer:
    """The picture of all groups."""
    now_s = fleet.now_s()
    scribe = _Scribe(fleet, now_s)
    plane = fleet.plane
    views = plane.groups.views
    placed = {server_id for view in views.values() for server_id in view.stands}
    return GroupsAnswer(
        version=VERSION,
        router=_router(fleet, config, now_s),
        groups=tuple(_group(view, scribe) for view in views.values()),
        unplaced=tuple(
            scribe.server(entry) for entry in plane.registry if entry.server_id not in placed
        ),
        unheard=tuple(Unheard(url=url, reason=reason) for url, reason in fleet.unheard()),
        events=tuple(
            EventView(ago_s=_ago(event.time_s, now_s), text=event.text)
            for event in reversed(plane.events)
        ),
    )


def servers_answer(fleet: Fleet) -> ServersAnswer:
    """All servers in one list."""
    servers = (placed_server(fleet, entry) for entry in fleet.plane.registry)
    return ServersAnswer(version=VERSION, servers=tuple(servers))


def placed_server(fleet: Fleet, entry: Entry) -> PlacedServer:
    """One server with its place."""
    view = fleet.plane.groups.of(entry.server_id)
    server = _Scribe(fleet, fleet.now_s()).server(entry)
    return PlacedServer(
        **msgspec.structs.asdict(server),
        group=view.name if view else "",
        epoch=view.epoch if view else 0,
    )


def stand_of(fleet: Fleet, server_id: str) -> Stand:
    """How a registered server stands."""
    groups = fleet.plane.groups
    view = groups.of(server_id)
    if view is None:
        return UNPLACED, groups.homeless.get(server_id, "")
    stand = view.stands[server_id]
    return str(stand.standing), stand.reason


class _Scribe:
    """Writes servers down; knows the names of all."""

    def __init__(self, fleet: Fleet, now_s: float) -> None:
        self._fleet = fleet
        self._now_s = now_s
        self._ttl_s = fleet.plane.registry.terms.ttl_s
        self._name_of = {entry.boot_id: entry.server_id for entry in fleet.plane.registry}

    def server(self, entry: Entry) -> ServerView:
        registration, report = entry.registration, entry.report
        traffic = self._fleet.traffic(entry.server_id)
        standing, reason = stand_of(self._fleet, entry.server_id)
        return ServerView(
            server_id=entry.server_id,
            boot_id=entry.boot_id,
            role=registration.role,
            url=registration.url,
            standing=standing,
            reason=reason,
            is_static=self._fleet.is_static(entry.server_id),
            last_heard_ago_s=_ago(entry.expires_s - self._ttl_s, self._now_s),
            models=registration.models,
            shard=registration.shard,
            attached=self._names(report.attached),
            lost=tuple(
                Lost(peer=self._name(loss.boot_id), reason=loss.reason) for loss in report.lost
            ),
            capacity=registration.capacity,
            load=report.load,
            num_in_flight=traffic.num_in_flight,
            num_served=traffic.num_served,
            num_failed=traffic.num_failed,
            ttft_ms=None if traffic.ttft_s is None else round(traffic.ttft_s * 1000, 3),
        )

    def _names(self, boot_ids: Iterable[str]) -> tuple[str, ...]:
        return tuple(self._name(boot_id) for boot_id in boot_ids)

    def _name(self, boot_id: str) -> str:
        return self._name_of.get(boot_id, boot_id)


def _group(view: View, scribe: _Scribe) -> GroupView:
    group = view.group
    return GroupView(
        name=view.name,
        state=view.stand.state,
        reason=view.stand.reason,
        epoch=view.epoch,
        models=view.models,
        fingerprint=group.shape.fingerprint,
        attn=tuple(scribe.server(entry) for entry in group.attn),
        mlp=tuple(scribe.server(entry) for _, entry in sorted(group.mlp.items())),
    )


def _router(fleet: Fleet, config: RouterConfig, now_s: float) -> RouterView:
    return RouterView(
        boot_id=fleet.boot_id,
        package_version=__version__,
        up_s=_ago(fleet.started_s, now_s),
        policy=config.policy,
        data_plane=config.data_plane,
        ratio=config.ratio or None,
        num_requests_in_flight=fleet.num_requests_in_flight(),
        num_requests_waiting=fleet.num_requests_waiting(),
    )


def _ago(when_s: float, now_s: float) -> float:
    return round(max(0.0, now_s - when_s), 3)
