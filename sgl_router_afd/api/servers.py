"""Servers and groups: the lists, drains and removals."""

from __future__ import annotations

from aiohttp import web

from sgl_router_afd.api.answers import ApiError, decode, json_answer, read_body
from sgl_router_afd.api.shapes import DrainAnswer, DrainRequest, RemovedAnswer
from sgl_router_afd.api.view import groups_answer, placed_server, servers_answer, stand_of
from sgl_router_afd.config import RouterConfig
from sgl_router_afd.control.registry import Entry
from sgl_router_afd.control.standing import Standing
from sgl_router_afd.fleet import Fleet

MAX_DRAIN_BODY_BYTES = 16 * 1024


class ServerDesk:
    """Shows and changes servers and groups.

    Args:
        fleet: Has them.
        config: The router's settings, which the picture of the groups tells.
    """

    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self._fleet = fleet
        self._config = config

    async def groups(self, _request: web.Request) -> web.Response:
        return json_answer(groups_answer(self._fleet, self._config))

    async def servers(self, _request: web.Request) -> web.Response:
        return json_answer(servers_answer(self._fleet))

    async def server(self, request: web.Request) -> web.Response:
        return json_answer(placed_server(self._fleet, self._entry(request)))

    async def remove(self, request: web.Request) -> web.Response:
        fleet, entry = self._fleet, self._entry(request)
        if fleet.is_static(entry.server_id):
            fleet.remove_static(entry.registration.url)
        fleet.plane.remove(entry.server_id, fleet.now_s())
        fleet.changed()
        return json_answer(RemovedAnswer(server_id=entry.server_id))

    async def drain_server(self, request: web.Request) -> web.Response:
        reason = await _drain_reason(request)
        return self._drain_server(request, reason)

    async def undrain_server(self, request: web.Request) -> web.Response:
        return self._drain_server(request, "")

    async def drain_group(self, request: web.Request) -> web.Response:
        reason = await _drain_reason(request)
        return self._drain_group(request, reason)

    async def undrain_group(self, request: web.Request) -> web.Response:
        return self._drain_group(request, "")

    def _drain_server(self, request: web.Request, reason: str) -> web.Response:
        entry = self._entry(request)
        self._fleet.plane.drain(entry.server_id, reason, self._fleet.now_s())
        self._fleet.changed()
        standing, reason = stand_of(self._fleet, entry.server_id)
        with_group = reason if standing == Standing.DRAINING else ""
        why = entry.why_draining or with_group
        return json_answer(DrainAnswer(name=entry.server_id, is_draining=why != "", reason=why))

    def _drain_group(self, request: web.Request, reason: str) -> web.Response:
        name = request.match_info["name"]
        if not self._fleet.plane.drain_group(name, reason, self._fleet.now_s()):
            raise ApiError(404, f"there is no group {name!r}; GET /afd/v1/groups lists them")
        self._fleet.changed()
        return json_answer(DrainAnswer(name=name, is_draining=reason != "", reason=reason))

    def _entry(self, request: web.Request) -> Entry:
        server_id = request.match_info["server_id"]
        entry = self._fleet.plane.registry.get(server_id)
        if entry is None:
            raise ApiError(404, f"there is no server {server_id!r}; GET /afd/v1/servers lists them")
        return entry


async def _drain_reason(request: web.Request) -> str:
    body = await read_body(request, MAX_DRAIN_BODY_BYTES)
    return (decode(body, DrainRequest) if body else DrainRequest()).reason
