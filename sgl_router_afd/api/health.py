"""/health, /readiness: does the router live, and can it serve?"""

from __future__ import annotations

from aiohttp import web

from sgl_router_afd.api.answers import ApiError, json_answer
from sgl_router_afd.api.shapes import GroupReadiness, HealthAnswer, ReadinessAnswer
from sgl_router_afd.control.standing import GroupState
from sgl_router_afd.fleet import Fleet
from sgl_router_afd.tables import attention_servers
from sglang_afd.config import Role

MAX_REASONS = 8


class HealthDesk:
    """Says how it goes.

    Args:
        fleet: Whose state it is.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def health(self, _request: web.Request) -> web.Response:
        """200 while the router lives; the body says whether it can serve."""
        plane = self._fleet.plane
        num_ready = sum(len(view.with_traffic()) for view in plane.groups.views.values())
        role_of = dict(self._fleet.statics())
        num_unheard = sum(role_of[url] is Role.ATTN for url, _ in self._fleet.unheard())
        num_servers = len(attention_servers(plane)) + num_unheard
        return json_answer(HealthAnswer(status="ok", num_ready=num_ready, num_servers=num_servers))

    async def readiness(self, _request: web.Request) -> web.Response:
        """200 while some group gets requests, else 503 with everybody's reasons."""
        groups = tuple(
            GroupReadiness(name=view.name, state=view.stand.state, reason=view.stand.reason)
            for view in self._fleet.plane.groups.views.values()
        )
        if not any(group.state is GroupState.READY for group in groups):
            raise ApiError(503, self._why_not(groups))
        trouble = self._fleet.plane.trouble
        return json_answer(ReadinessAnswer(status="ready", groups=groups, trouble=trouble))

    def _why_not(self, groups: tuple[GroupReadiness, ...]) -> str:
        homeless = self._fleet.plane.groups.homeless.items()
        trouble = self._fleet.plane.trouble
        reasons = [
            *([f"groups stay as they are: {trouble}"] if trouble else []),
            *(f"{group.name} is {group.state}: {group.reason}" for group in groups),
            *(f"{server_id} is in no group: {reason}" for server_id, reason in homeless),
            *(f"{url} was not heard of: {reason}" for url, reason in self._fleet.unheard()),
        ]
        if not reasons:
            return (
                "no server has registered; start servers with --afd-router and this router's "
                "URL, or the router with --attn and --mlp"
            )
        more = [f"and {len(reasons) - MAX_REASONS} more"] if len(reasons) > MAX_REASONS else []
        return "; ".join(["no group is ready", *reasons[:MAX_REASONS], *more])
