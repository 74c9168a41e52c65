"""Puts the endpoints together."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.endpoints import HEALTH, RELAYED, RELAYED_GET, RELAYED_POST, STATUS
from sgl_router_afd.pool import ServerPool
from sgl_router_afd.relay import Relay
from sgl_router_afd.replies import error_reply, json_reply


def build_app(config: RouterConfig, pool: ServerPool, relay: Relay) -> web.Application:
    """The application; the caller owns the pool's watchers and the relay's session."""
    own = _OwnEndpoints(config, pool)
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[_errors_as_json])
    app.router.add_get(HEALTH, own.health)
    app.router.add_get(STATUS, own.status)
    for path in RELAYED_POST:
        app.router.add_post(path, relay.handle)
    for path in RELAYED_GET:
        app.router.add_get(path, relay.handle, allow_head=False)
    return app


class _OwnEndpoints:
    def __init__(self, config: RouterConfig, pool: ServerPool) -> None:
        self._config = config
        self._pool = pool

    async def health(self, _request: web.Request) -> web.Response:
        """200 while the router lives; the body says whether it can serve."""
        return json_reply(
            {
                "status": "ok",
                "num_ready": self._pool.num_ready,
                "num_servers": len(self._pool.servers),
            }
        )

    async def status(self, _request: web.Request) -> web.Response:
        return json_reply(
            {
                "role": "router",
                "policy": self._config.policy,
                "num_ready": self._pool.num_ready,
                "servers": [
                    {
                        "url": server.url,
                        "state": server.state,
                        "reason": server.reason,
                        "num_in_flight": server.num_in_flight,
                        "num_served": server.num_served,
                        "last_seen_ago_s": self._pool.last_seen_ago_s(server),
                    }
                    for server in self._pool.servers
                ],
            }
        )


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return error_reply(
            413,
            f"the request body is larger than the {request.client_max_size} bytes that this router "
            "takes; send less, or start it with a larger --max-body-bytes",
        )
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        reply = error_reply(405, f"{request.path} takes {allowed}, got {request.method}")
        reply.headers["Allow"] = allowed
        return reply
    except web.HTTPNotFound:
        return error_reply(
            404,
            f"the router has no {request.path}; it relays {', '.join(RELAYED)}; "
            "send anything else to an attention server itself",
        )
