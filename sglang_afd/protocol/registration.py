"""What servers and the router tell each other about being there; JSON bodies, strict and bounded.

A server registers (`POST /afd/v1/servers`) and gets a lease, renews it with a report of how it
stands, and says goodbye. Each answer tells it what the router wants of it now.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_afd.config import MAX_MLP_RANKS, MAX_PEERS, Role
from sglang_afd.errors import ProtocolError, Refused
from sglang_afd.protocol.server_url import Url, check_url

REGISTRATION_VERSION = 1
MAX_MESSAGE_BYTES = 256 * 1024
MAX_NAME_CHARS = 256

ServerId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}\Z")]
BootId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}\Z")]  # what a handshake takes
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
GroupName = Annotated[str, Meta(pattern=r"^([a-z0-9-]{1,64})?\Z")]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Text = Annotated[str, Meta(max_length=2000)]
Address = Annotated[str, Meta(max_length=320)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Epoch = Annotated[int, Meta(ge=0, le=2**48)]
Instant = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0)]


class Condition(StrEnum):
    """How a server says that it stands; the first four are an attention server's words."""

    STARTING = "starting"  # never attached yet
    READY = "ready"
    STALLED = "stalled"  # an attention server without its MLP servers, an MLP server that hangs
    DETACHED = "detached"  # stalled for so long that it refuses requests
    LOADING = "loading"  # an MLP server without its experts yet
    SPARE = "spare"  # an MLP server without a rank
    DISPLACED = "displaced"  # an MLP server whose rank another one serves


class DeclineCode(StrEnum):
    """Why the router declined, for programs."""

    VERSION = "version"  # of these messages
    UNKNOWN_LEASE = "unknown_lease"  # register again
    REPLACED = "replaced"  # by a newer process under the same name or address
    CAPACITY = "capacity"  # more servers than the router keeps


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Strict and immutable; unknown fields are refused."""


class Shard(_Message, frozen=True):
    """Which experts an MLP server owns."""

    ep_rank: Annotated[int, Meta(ge=0, lt=MAX_MLP_RANKS)]
    ep_size: Annotated[int, Meta(ge=1, le=MAX_MLP_RANKS)]
    first_expert: Count
    stop_expert: Count  # one past the last


class Capacity(_Message, frozen=True):
    """What an attention server can hold; zeros of an MLP server."""

    max_running_requests: Count
    kv_tokens: Count


class Load(_Message, frozen=True):
    """What a server holds and does now; what is not of its role is zero."""

    num_running: Count  # attn
    num_waiting: Count  # attn
    free_kv_tokens: Count  # attn; those that hold nothing but reusable prefixes among them
    tokens_per_s: Rate  # attn: generated of late
    expert_imbalance: Rate  # mlp: rows of the busiest expert over the mean of all; 0 unknown


class PeerLoss(_Message, frozen=True):
    """One peer that the reporting server cannot reach."""

    boot_id: BootId
    reason: Text


class Report(_Message, frozen=True):
    """How one server stands."""

    seq: Count  # counts the reports of one process, so that a late one is known as such
    condition: Condition
    reason: Text  # why it is not ready, for people
    # Peers in contact; of rank 0 also the other ranks.
    attached: Annotated[tuple[BootId, ...], Meta(max_length=MAX_PEERS + MAX_MLP_RANKS)]
    lost: Annotated[tuple[PeerLoss, ...], Meta(max_length=64)]
    load: Load
    is_draining: bool  # it was asked to end, and finishes what it has


class Registration(_Message, frozen=True, tag="register"):
    """A server to the router: I am here."""

    version: int
    server_id: ServerId  # stays the same over restarts
    boot_id: BootId  # of this process
    started_at_s: Instant  # time.time(); of two processes under one name the later one counts
    sent_at_s: Instant  # time.time(), so that an old message cannot be played back
    role: Role
    models: Annotated[tuple[Name, ...], Meta(max_length=16)]  # names that requests may say
    fingerprint: Fingerprint
    num_experts: Annotated[int, Meta(ge=1, le=65536)]  # of one layer, logical ones
    url: Url
    exchange_address: Address  # of an MLP server; "" while its experts load
    shard: Shard | None  # of an MLP server with a rank
    peer_urls: Annotated[tuple[Url, ...], Meta(max_length=64)]  # --afd-mlp or --afd-leader
    capacity: Capacity
    group: GroupName  # as the last lease said; "" of a new process
    epoch: Epoch  # the same
    report: Report

    def __post_init__(self) -> None:
        for url in (self.url, *self.peer_urls):
            check_url(url)
        if self.role is Role.ATTN:
            if self.shard is not None:
                raise ValueError("an attention server owns no experts, and this one has a shard")
            if not self.models:
                raise ValueError("an attention server needs the name of a model")
        elif self.shard is not None:
            _check_shard(self.shard, self.num_experts)


class Renewal(_Message, frozen=True, tag="renew"):
    """A server to the router: I am still here, and this is how I stand."""

    version: int
    server_id: ServerId
    boot_id: BootId
    lease_id: Name
    sent_at_s: Instant
    report: Report


class Leave(_Message, frozen=True, tag="leave"):
    """A server to the router: I end now."""

    version: int
    server_id: ServerId
    boot_id: BootId
    lease_id: Name
    sent_at_s: Instant


class Lease(_Message, frozen=True, tag="lease"):
    """The router to a server, in answer to each message but the last."""

    version: int
    lease_id: Name
    ttl_s: float  # from now on
    renew_s: float  # renew so often, and at once when something changed
    group: GroupName  # "" while the server belongs to none
    epoch: Epoch  # of the group's members; never goes back
    mlp_urls: tuple[Url, ...]  # where rank 0 may be; empty: keep what the command line says
    reason: Text  # why the server gets no traffic or has no group, for people; "" if it serves
    is_draining: bool  # finish what you have
    may_stop: bool  # it drains, and nobody needs it any more


class Decline(_Message, frozen=True, tag="decline"):
    """The router to a server: not so."""

    code: DeclineCode
    message: Text


ToRouter = Registration | Renewal | Leave
FromRouter = Lease | Decline
AnyMessage = ToRouter | FromRouter


class _Versioned(msgspec.Struct, frozen=True):
    version: int = -1


_encoder = msgspec.json.Encoder()
_version_of = msgspec.json.Decoder(_Versioned)
_to_router = msgspec.json.Decoder(ToRouter)
_from_router = msgspec.json.Decoder(FromRouter)


def encode(message: AnyMessage) -> bytes:
    """The body of a request or an answer."""
    return _encoder.encode(message)


def decode_to_router(body: bytes) -> ToRouter:
    """Read what a server sent.

    Raises:
        Refused: Of another version; told apart first, since its fields may differ.
        ProtocolError: Too long, or no message.
    """
    _check_size(body)
    try:
        version = _version_of.decode(body).version
        if version not in (REGISTRATION_VERSION, -1):
            raise Refused(
                DeclineCode.VERSION,
                f"the server registers with version {version}, this router speaks "
                f"{REGISTRATION_VERSION}; install the same sglang-afd on both",
            )
        return _to_router.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of an sglang-afd server: {error}") from None


def decode_from_router(body: bytes) -> FromRouter:
    """Read what the router answered.

    Raises:
        ProtocolError: Too long, or no message.
    """
    _check_size(body)
    try:
        return _from_router.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not an answer of an sglang-afd router: {error}") from None


def _check_size(body: bytes) -> None:
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
        )


def _check_shard(shard: Shard, num_experts: int) -> None:
    if shard.ep_rank >= shard.ep_size:
        raise ValueError(f"rank {shard.ep_rank} does not fit an ep_size of {shard.ep_size}")
    if not shard.first_expert < shard.stop_expert <= num_experts:
        raise ValueError(
            f"experts {shard.first_expert} to {shard.stop_expert - 1} are no part of the model's "
            f"{num_experts}"
        )
