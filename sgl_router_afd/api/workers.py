"""/workers: servers in the shape of SGLang's gateway, for tools that know that one.

A worker that is added is an address that the router asks, like one of --attn or --mlp. Its id is
made of the address, so that it is the same before and after its server answers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import msgspec
from aiohttp import web

from sgl_router_afd.api.answers import ApiError, decode, json_answer, read_body
from sgl_router_afd.api.shapes import (
    JobStatus,
    WorkerAccepted,
    WorkerRequest,
    WorkersAnswer,
    WorkerStats,
    WorkerView,
)
from sgl_router_afd.api.view import stand_of
from sgl_router_afd.control.registry import Entry
from sgl_router_afd.control.standing import Standing
from sgl_router_afd.fleet import Fleet
from sglang_afd.config import Role
from sglang_afd.protocol.server_url import Url, check_url

MAX_WORKER_BODY_BYTES = 64 * 1024
MAX_ASKED = 1024  # addresses; each costs a poll every `--status-interval-s`
ROLES = {"regular": Role.ATTN, "attn": Role.ATTN, "mlp": Role.MLP}
TYPES = {Role.ATTN: "regular", Role.MLP: "mlp"}
WITHOUT_EFFECT = ("model_id", "priority", "cost", "labels")
PRIORITY, COST = 50, 1.0  # the gateway's defaults; nothing here depends on them
DRAIN_REASON = "DELETE /workers asked for it"


def worker_id(url: str) -> str:
    """The id of the server at an address."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, url))


class WorkerDesk:
    """Shows, adds and removes workers.

    Args:
        fleet: Has them.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def list(self, _request: web.Request) -> web.Response:
        workers = tuple(self._all())
        kinds = [worker.worker_type for worker in workers]
        stats = WorkerStats(
            regular_count=kinds.count("regular"),
            prefill_count=0,
            decode_count=0,
            mlp_count=kinds.count("mlp"),
        )
        return json_answer(WorkersAnswer(workers=workers, total=len(workers), stats=stats))

    async def get(self, request: web.Request) -> web.Response:
        return json_answer(self._find(request.match_info["worker_id"]))

    async def add(self, request: web.Request) -> web.Response:
        asked = decode(await read_body(request, MAX_WORKER_BODY_BYTES), WorkerRequest)
        role, url = _role(asked.worker_type), _url(asked.url)
        self._refuse_other_role(url, role)
        statics = dict(self._fleet.statics())
        if url not in statics:
            if len(statics) >= MAX_ASKED:
                raise ApiError(
                    409,
                    f"this router asks {MAX_ASKED} addresses already; DELETE some of them, or have "
                    "the server register itself with --afd-router",
                )
            self._fleet.add_static(url, role)
        entry = self._entry_at(url)
        if entry is not None and entry.drain_reason == DRAIN_REASON:
            self._fleet.plane.drain(entry.server_id, "", self._fleet.now_s())
        self._fleet.changed()
        given = msgspec.structs.asdict(asked)
        ignored = [name for name in WITHOUT_EFFECT if given[name] is not None]
        more = f"; without effect here: {', '.join(ignored)}" if ignored else ""
        message = f"the router asks {url} how it stands; it gets requests once its group is ready"
        if role is Role.MLP:
            message = f"the router asks {url} how it stands; an MLP server never gets requests"
        return _accepted(url, message + more)

    async def delete(self, request: web.Request) -> web.Response:
        worker = self._find(request.match_info["worker_id"])
        fleet, url = self._fleet, worker.url
        fleet.remove_static(url)
        message = "the router asks it no more; requests that it has go on"
        entry = self._entry_at(url)
        if entry is not None:
            fleet.plane.drain(entry.server_id, DRAIN_REASON, fleet.now_s())
            message = "it registered itself, so it drains: it gets no new requests, and finishes"
        fleet.changed()
        return _accepted(url, message)

    def _all(self) -> Iterator[WorkerView]:
        known = set()
        for entry in self._fleet.plane.registry:
            known.add(entry.registration.url)
            yield self._registered(entry)
        reasons = dict(self._fleet.unheard())
        for url, role in self._fleet.statics():
            if url not in known:
                yield _awaited(url, role, reasons.get(url, "not asked yet"))

    def _find(self, name: str) -> WorkerView:
        for worker in self._all():
            if name in (worker.id, worker.url, worker.metadata.get("afd_server_id")):
                return worker
        raise ApiError(404, f"there is no worker {name!r}; GET /workers lists them")

    def _registered(self, entry: Entry) -> WorkerView:
        fleet, registration = self._fleet, entry.registration
        view = fleet.plane.groups.of(entry.server_id)
        standing, reason = stand_of(fleet, entry.server_id)
        models = registration.models or (view.models if view else ())
        return WorkerView(
            id=worker_id(registration.url),
            url=registration.url,
            model_id=models[0] if models else "",
            priority=PRIORITY,
            cost=COST,
            worker_type=TYPES[registration.role],
            is_healthy=standing == Standing.SERVING,
            load=fleet.traffic(entry.server_id).num_in_flight,
            connection_mode="Http",
            metadata={
                "afd_server_id": entry.server_id,
                "afd_group": view.name if view else "",
                "afd_epoch": str(view.epoch if view else 0),
                "afd_standing": standing,
                "afd_reason": reason,
            },
        )

    def _entry_at(self, url: str) -> Entry | None:
        entries = self._fleet.plane.registry
        return next((entry for entry in entries if entry.registration.url == url), None)

    def _refuse_other_role(self, url: str, role: Role) -> None:
        entry = self._entry_at(url)
        held = entry.registration.role if entry else dict(self._fleet.statics()).get(url, role)
        if held is not role:
            raise ApiError(
                409,
                f"{url} is there already, with worker_type {TYPES[held]}; DELETE it first if it "
                f"should be {TYPES[role]}",
            )


def _accepted(url: str, message: str) -> web.Response:
    known = worker_id(url)
    location = f"/workers/{known}"
    answer = WorkerAccepted(
        status="accepted", worker_id=known, url=url, location=location, message=message
    )
    return json_answer(answer, status=202, headers={"Location": location})


def _awaited(url: str, role: Role, reason: str) -> WorkerView:
    job = JobStatus(job_type="AddWorker", worker_url=url, status="pending", message=reason)
    return WorkerView(
        id=worker_id(url),
        url=url,
        model_id="",
        priority=PRIORITY,
        cost=COST,
        worker_type=TYPES[role],
        is_healthy=False,
        load=0,
        connection_mode="Http",
        metadata={},
        job_status=job,
    )


def _role(worker_type: str) -> Role:
    if worker_type not in ROLES:
        raise ApiError(
            400,
            f"worker_type {worker_type!r} is not known here; give regular (or attn) for an "
            "attention server, or mlp",
        )
    return ROLES[worker_type]


def _url(text: str) -> str:
    try:
        url = msgspec.convert(text.rstrip("/"), Url)
        check_url(url)
    except ValueError:  # msgspec's is one, too
        raise ApiError(
            400, f"url {text[:320]!r} is no http://host:port; give the address of one server"
        ) from None
    return url
