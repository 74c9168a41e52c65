"""All endpoints of the API, and their way into an application."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from sgl_router_afd.api.answers import errors_as_json, json_answer
from sgl_router_afd.api.decide import Decider
from sgl_router_afd.api.endpoint import Access, Endpoint
from sgl_router_afd.api.guard import Guard, guarding
from sgl_router_afd.api.health import HealthDesk
from sgl_router_afd.api.models import ModelDesk, session_of
from sgl_router_afd.api.openapi import document
from sgl_router_afd.api.registration import RegistrationDesk
from sgl_router_afd.api.servers import ServerDesk
from sgl_router_afd.api.shapes import (
    Decision,
    DrainAnswer,
    DrainRequest,
    GroupsAnswer,
    HealthAnswer,
    ModelsAnswer,
    PlacedServer,
    ReadinessAnswer,
    RemovedAnswer,
    ServersAnswer,
    WorkerAccepted,
    WorkerRequest,
    WorkersAnswer,
    WorkerView,
)
from sgl_router_afd.api.workers import WorkerDesk
from sgl_router_afd.config import RouterConfig
from sgl_router_afd.fleet import Fleet
from sglang_afd.protocol.registration import Decline, Lease, ToRouter

SERVERS = "/afd/v1/servers"
GROUPS = "/afd/v1/groups"
ROUTE = "/afd/v1/route"
WORKERS = "/workers"


def add_routes(
    app: web.Application,
    fleet: Fleet,
    config: RouterConfig,
    wall_clock: Callable[[], float] = time.time,
) -> None:
    """Serve the API.

    Args:
        app: Gets the routes, and for all that it serves keys and errors as JSON.
        fleet: What is shown and changed.
        config: The router's settings.
        wall_clock: What servers stamp their messages with.
    """
    endpoints = [
        *_server_endpoints(fleet, config, wall_clock),
        *_group_endpoints(fleet, config),
        *_route_endpoints(fleet, config),
        *_worker_endpoints(fleet),
        *_health_endpoints(fleet),
    ]
    endpoints.append(_document_endpoint(app, endpoints))
    for one in endpoints:
        app.router.add_route(one.method, one.path, one.handler)
        if one.method == "GET":
            app.router.add_route("HEAD", one.path, one.handler)
    app.middlewares.extend([errors_as_json, guarding(Guard(config), endpoints)])
    app.cleanup_ctx.append(session_of)


def _server_endpoints(
    fleet: Fleet, config: RouterConfig, wall_clock: Callable[[], float]
) -> list[Endpoint]:
    desk = ServerDesk(fleet, config)
    registrations = RegistrationDesk(fleet, config.afd_secret, config.host, wall_clock)
    one, drain = SERVERS + "/{server_id}", SERVERS + "/{server_id}/drain"
    return [
        Endpoint(
            method="POST",
            path=SERVERS,
            handler=registrations.take,
            access=Access.SERVER,
            summary="A server registers, renews its lease, or leaves",
            takes=ToRouter,
            answers={200: Lease, 204: None, 409: Decline},
            errors=(503,),
        ),
        Endpoint(
            method="GET",
            path=SERVERS,
            handler=desk.servers,
            access=Access.READ,
            summary="All servers",
            answers={200: ServersAnswer},
        ),
        Endpoint(
            method="GET",
            path=one,
            handler=desk.server,
            access=Access.READ,
            summary="One server",
            answers={200: PlacedServer},
            errors=(404,),
        ),
        Endpoint(
            method="DELETE",
            path=one,
            handler=desk.remove,
            access=Access.CHANGE,
            summary="Forget a server at once; one that runs and registers itself comes back",
            answers={200: RemovedAnswer},
            errors=(404,),
        ),
        Endpoint(
            method="POST",
            path=drain,
            handler=desk.drain_server,
            access=Access.CHANGE,
            summary="Give a server no new requests; it finishes what it has",
            takes=DrainRequest,
            needs_body=False,
            answers={200: DrainAnswer},
            errors=(404,),
        ),
        Endpoint(
            method="DELETE",
            path=drain,
            handler=desk.undrain_server,
            access=Access.CHANGE,
            summary="Take back that a server drains",
            answers={200: DrainAnswer},
            errors=(404,),
        ),
    ]


def _group_endpoints(fleet: Fleet, config: RouterConfig) -> list[Endpoint]:
    desk = ServerDesk(fleet, config)
    drain = GROUPS + "/{name}/drain"
    return [
        Endpoint(
            method="GET",
            path=GROUPS,
            handler=desk.groups,
            access=Access.READ,
            summary="Groups with their servers, servers without a group, and recent events",
            answers={200: GroupsAnswer},
        ),
        Endpoint(
            method="POST",
            path=drain,
            handler=desk.drain_group,
            access=Access.CHANGE,
            summary="Give a group no new requests; its servers finish what they have",
            takes=DrainRequest,
            needs_body=False,
            answers={200: DrainAnswer},
            errors=(404,),
        ),
        Endpoint(
            method="DELETE",
            path=drain,
            handler=desk.undrain_group,
            access=Access.CHANGE,
            summary="Take back that a group drains",
            answers={200: DrainAnswer},
            errors=(404,),
        ),
    ]


def _route_endpoints(fleet: Fleet, config: RouterConfig) -> list[Endpoint]:
    decider = Decider(fleet, config.policy)
    query = {"model": "the request's model; left out for requests that say none"}
    return [
        Endpoint(
            method="GET",
            path=ROUTE,
            handler=decider.of_model,
            access=Access.READ,
            summary="Which server a request should go to; nothing is sent there",
            query=query,
            answers={200: Decision},
            errors=(400, 404, 503),
        ),
        Endpoint(
            method="POST",
            path=ROUTE,
            handler=decider.of_body,
            access=Access.READ,
            summary="The same for the request whose body is sent here, which may stop after its "
            "first 16 KiB if the query says the model; the policy prefix needs it",
            query=query,
            takes=dict,
            answers={200: Decision},
            errors=(404, 503),
        ),
    ]


def _worker_endpoints(fleet: Fleet) -> list[Endpoint]:
    desk = WorkerDesk(fleet)
    one = WORKERS + "/{worker_id}"
    return [
        Endpoint(
            method="GET",
            path=WORKERS,
            handler=desk.list,
            access=Access.READ,
            summary="All servers, in the shape of SGLang's gateway",
            answers={200: WorkersAnswer},
        ),
        Endpoint(
            method="POST",
            path=WORKERS,
            handler=desk.add,
            access=Access.CHANGE,
            summary="Ask the server at an address, as if --attn or --mlp had named it",
            takes=WorkerRequest,
            answers={202: WorkerAccepted},
            errors=(409,),
        ),
        Endpoint(
            method="GET",
            path=one,
            handler=desk.get,
            access=Access.READ,
            summary="One worker, by its id, its server id or its URL",
            answers={200: WorkerView},
            errors=(404,),
        ),
        Endpoint(
            method="DELETE",
            path=one,
            handler=desk.delete,
            access=Access.CHANGE,
            summary="Ask a server no more; one that registered itself drains",
            answers={202: WorkerAccepted},
            errors=(404,),
        ),
    ]


def _health_endpoints(fleet: Fleet) -> list[Endpoint]:
    health, models = HealthDesk(fleet), ModelDesk(fleet)
    return [
        Endpoint(
            method="GET",
            path="/health",
            handler=health.health,
            access=Access.OPEN,
            summary="200 while the router lives",
            answers={200: HealthAnswer},
        ),
        Endpoint(
            method="GET",
            path="/readiness",
            handler=health.readiness,
            access=Access.OPEN,
            summary="200 while some group gets requests",
            answers={200: ReadinessAnswer},
            errors=(503,),
        ),
        Endpoint(
            method="GET",
            path="/v1/models",
            handler=models.models,
            access=Access.CLIENT,
            summary="The models of all groups; with one model, its server answers itself",
            answers={200: ModelsAnswer},
        ),
    ]


def _document_endpoint(app: web.Application, endpoints: list[Endpoint]) -> Endpoint:
    async def answer(_request: web.Request) -> web.Response:
        return json_answer(document(app, endpoints))

    return Endpoint(
        method="GET",
        path="/openapi.json",
        handler=answer,
        access=Access.OPEN,
        summary="This document",
        answers={200: dict[str, Any]},
    )
