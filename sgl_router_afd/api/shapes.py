"""What the API takes and answers, as structs; the OpenAPI document is made of them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_router_afd.control.standing import GroupState
from sglang_afd.config import Role
from sglang_afd.protocol.registration import Capacity, Load, Shard

VERSION = 1
UNPLACED = "unplaced"  # stands of a server that belongs to no group


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON object."""


class ErrorDetail(Shape, frozen=True):
    """What was wrong, and what to do about it."""

    message: str
    type: str
    code: int


class ErrorAnswer(Shape, frozen=True):
    """Every error of this API."""

    error: ErrorDetail


class Lost(Shape, frozen=True):
    """A peer that a server says it cannot reach."""

    peer: str  # its server id, or its boot id where the router does not know it
    reason: str


class ServerView(Shape, frozen=True):
    """One server now."""

    server_id: str
    boot_id: str
    role: Role
    url: str
    standing: str  # serving, waiting, degraded, draining or unplaced
    reason: str
    is_static: bool
    last_heard_ago_s: float
    models: tuple[str, ...]
    shard: Shard | None
    attached: tuple[str, ...]  # server ids, or boot ids of those that the router does not know
    lost: tuple[Lost, ...]
    capacity: Capacity
    load: Load
    num_in_flight: int
    num_served: int
    num_failed: int
    ttft_ms: float | None


class PlacedServer(ServerView, frozen=True):
    """One server, and where it belongs."""

    group: str  # "" of one that belongs to none
    epoch: int


class GroupView(Shape, frozen=True):
    """One group now."""

    name: str
    state: GroupState
    reason: str
    epoch: int
    models: tuple[str, ...]
    fingerprint: str
    attn: tuple[ServerView, ...]
    mlp: tuple[ServerView, ...]


class RouterView(Shape, frozen=True):
    """The router itself."""

    boot_id: str
    package_version: str
    up_s: float
    policy: str
    data_plane: str
    ratio: str | None
    num_requests_in_flight: int
    num_requests_waiting: int


class Unheard(Shape, frozen=True):
    """An address of --attn, --mlp or POST /workers at which no server answered yet."""

    url: str
    reason: str


class EventView(Shape, frozen=True):
    """Something that happened."""

    ago_s: float
    text: str


class GroupsAnswer(Shape, frozen=True):
    """Everything that the router knows."""

    version: int
    router: RouterView
    groups: tuple[GroupView, ...]
    unplaced: tuple[ServerView, ...]
    unheard: tuple[Unheard, ...]
    events: tuple[EventView, ...]  # the newest first


class ServersAnswer(Shape, frozen=True):
    """All servers, those that registered first before the others."""

    version: int
    servers: tuple[PlacedServer, ...]


class DrainRequest(Shape, frozen=True, forbid_unknown_fields=True):
    """Why somebody wants no new requests to go there."""

    reason: Annotated[str, Meta(min_length=1, max_length=1000)] = "an operator asked for it"


class DrainAnswer(Shape, frozen=True):
    """What is in force now."""

    name: str  # of the server or the group
    is_draining: bool
    reason: str


class RemovedAnswer(Shape, frozen=True):
    """A server that the router has forgotten."""

    server_id: str


class Decision(Shape, frozen=True):
    """The server that a request should go to."""

    server_id: str
    url: str
    group: str
    epoch: int


class HealthAnswer(Shape, frozen=True):
    """The router lives."""

    status: str
    num_ready: int  # attention servers that get requests
    num_servers: int  # attention servers that the router knows, those that never answered too


class GroupReadiness(Shape, frozen=True):
    """Whether a group gets requests."""

    name: str
    state: GroupState
    reason: str


class ReadinessAnswer(Shape, frozen=True):
    """Some group gets requests."""

    status: str
    groups: tuple[GroupReadiness, ...]
    trouble: str  # why all groups have to stay as they are; "" while they need not


class ModelCard(Shape, frozen=True):
    """A model, in OpenAI's form with SGLang's additions."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None  # null where no server of the model answers


class ModelsAnswer(Shape, frozen=True):
    """The models of all groups."""

    object: str
    data: tuple[ModelCard, ...]


class WorkerRequest(Shape, frozen=True, forbid_unknown_fields=True):
    """A server to add, as SGLang's gateway is told of one."""

    url: str
    worker_type: str = "regular"  # or attn, which is the same; mlp
    # Fields of the gateway that have no effect here; the answer says so.
    model_id: str | None = None
    priority: int | None = None
    cost: float | None = None
    labels: dict[str, str] | None = None


class WorkerAccepted(Shape, frozen=True):
    """A change that is under way."""

    status: str
    worker_id: str
    url: str
    location: str
    message: str


class JobStatus(Shape, frozen=True):
    """Why a worker that was added is not there yet."""

    job_type: str
    worker_url: str
    status: str
    message: str


class WorkerView(Shape, frozen=True):
    """A server in the form of SGLang's gateway."""

    id: str
    url: str
    model_id: str
    priority: int  # always 50
    cost: float  # always 1
    worker_type: str  # regular: an attention server; mlp: one that never gets a request
    is_healthy: bool
    load: int
    connection_mode: str
    metadata: dict[str, str]
    job_status: JobStatus | None = None


class WorkerStats(Shape, frozen=True):
    """Workers by type."""

    regular_count: int
    prefill_count: int
    decode_count: int
    mlp_count: int


class WorkersAnswer(Shape, frozen=True):
    """All workers."""

    workers: tuple[WorkerView, ...]
    total: int
    stats: WorkerStats
