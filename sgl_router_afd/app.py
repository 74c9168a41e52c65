"""The router's own endpoints; relay processes hand on what is not for a server."""

from __future__ import annotations

import msgspec
from aiohttp import web

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.counters import IN_FLIGHT, SERVED, SharedCounters
from sgl_router_afd.endpoints import HEALTH, METRICS, STATUS
from sgl_router_afd.metrics import CONTENT_TYPE, render
from sgl_router_afd.pool import ServerPool


def build_app(config: RouterConfig, pool: ServerPool, counters: SharedCounters) -> web.Application:
    """The application; the caller owns the pool's watchers."""
    own = _OwnEndpoints(config, pool, counters)
    app = web.Application(client_max_size=config.max_body_bytes)
    app.router.add_get(HEALTH, own.health)
    app.router.add_get(STATUS, own.status)
    app.router.add_get(METRICS, own.metrics)
    return app


class _OwnEndpoints:
    def __init__(self, config: RouterConfig, pool: ServerPool, counters: SharedCounters) -> None:
        self._config = config
        self._pool = pool
        self._counters = counters

    async def health(self, _request: web.Request) -> web.Response:
        """200 while the router lives; the body says whether it can serve."""
        return _json(
            {
                "status": "ok",
                "num_ready": self._pool.num_ready,
                "num_servers": len(self._pool.servers),
            }
        )

    async def status(self, _request: web.Request) -> web.Response:
        return _json(
            {
                "role": "router",
                "policy": self._config.policy,
                "num_ready": self._pool.num_ready,
                "servers": [
                    {
                        "url": server.url,
                        "state": server.state,
                        "reason": server.reason,
                        "num_in_flight": self._counters.total(IN_FLIGHT + server.slot),
                        "num_served": self._counters.total(SERVED + server.slot),
                        "last_seen_ago_s": self._pool.last_seen_ago_s(server),
                    }
                    for server in self._pool.servers
                ],
            }
        )

    async def metrics(self, _request: web.Request) -> web.Response:
        text = render(self._counters, self._pool.servers)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def _json(payload: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), content_type="application/json")
