"""The router's own endpoints; relay processes hand on what is not for a server."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from sgl_router_afd.api.routes import add_routes as add_api
from sgl_router_afd.api.view import stand_of
from sgl_router_afd.config import RouterConfig
from sgl_router_afd.control.standing import Standing
from sgl_router_afd.dataplane.counters import SharedCounters
from sgl_router_afd.endpoints import METRICS, STATUS
from sgl_router_afd.fleet import Fleet
from sgl_router_afd.metrics import CONTENT_TYPE, render, render_fleet
from sgl_router_afd.page import add_routes as add_page
from sgl_router_afd.tables import attention_servers
from sglang_afd.config import Role

UNHEARD = "unheard"  # the state of a URL of --attn at which no server answered yet


def build_app(
    config: RouterConfig,
    fleet: Fleet,
    counters: SharedCounters,
    more_metrics: Callable[[], str] | None = None,
) -> web.Application:
    """The application; the caller runs the fleet.

    Args:
        config: The router's settings.
        fleet: What is shown and changed.
        counters: Of the relay processes.
        more_metrics: Those of what relays in their place.
    """
    own = _OwnEndpoints(config, fleet, counters, more_metrics)
    app = web.Application(client_max_size=config.max_body_bytes)
    app.router.add_get(STATUS, own.status)
    app.router.add_get(METRICS, own.metrics)
    add_api(app, fleet, config)
    add_page(app)
    return app


class _OwnEndpoints:
    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        counters: SharedCounters,
        more_metrics: Callable[[], str] | None,
    ) -> None:
        self._config = config
        self._more_metrics = more_metrics
        self._fleet = fleet
        self._counters = counters

    async def status(self, _request: web.Request) -> web.Response:
        """The attention servers in short; `/afd/v1/groups` has everything."""
        servers = [*self._registered(), *self._unheard()]
        return _json(
            {
                "role": "router",
                "policy": self._config.policy,
                "num_ready": sum(server["state"] == Standing.SERVING for server in servers),
                "servers": servers,
            }
        )

    async def metrics(self, _request: web.Request) -> web.Response:
        """The router's metrics in the Prometheus text format."""
        more = self._more_metrics
        text = render(self._counters, self._fleet) if more is None else render_fleet(self._fleet)
        if more is not None:
            text += more()
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    def _registered(self) -> list[dict[str, object]]:
        plane, now_s = self._fleet.plane, self._fleet.now_s()
        servers: list[dict[str, object]] = []
        for entry in attention_servers(plane):
            state, reason = stand_of(self._fleet, entry.server_id)
            traffic = self._fleet.traffic(entry.server_id)
            heard_s = entry.expires_s - plane.registry.terms.ttl_s
            servers.append(
                {
                    "url": entry.registration.url,
                    "server_id": entry.server_id,
                    "state": state,
                    "reason": reason,
                    "num_in_flight": traffic.num_in_flight,
                    "num_served": traffic.num_served,
                    "last_seen_ago_s": round(now_s - heard_s, 3),
                }
            )
        return servers

    def _unheard(self) -> list[dict[str, object]]:
        role_of = dict(self._fleet.statics())
        return [
            {
                "url": url,
                "server_id": "",
                "state": UNHEARD,
                "reason": reason,
                "num_in_flight": 0,
                "num_served": 0,
                "last_seen_ago_s": None,
            }
            for url, reason in self._fleet.unheard()
            if role_of.get(url) is Role.ATTN
        ]


def _json(payload: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), content_type="application/json")
