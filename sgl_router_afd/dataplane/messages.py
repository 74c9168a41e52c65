"""What the control process and a relay process tell each other, and how it goes on the wire."""

from __future__ import annotations

import msgspec

from sgl_router_afd.config import RouterConfig

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
LENGTH_BYTES = 4
UNPLACED = "unplaced"  # the state of a server that belongs to no group


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The first message to a relay process."""

    config: RouterConfig
    relay: int  # 0 .. config.num_relays - 1
    control_path: str  # the Unix socket of the router's own endpoints

    def __post_init__(self) -> None:
        assert self.config == self.config.for_relay(), "it has a key that no relay may be told"


def setup_of(config: RouterConfig, relay: int, control_path: str) -> Setup:
    """What this relay process is told first."""
    return Setup(config=config.for_relay(), relay=relay, control_path=control_path)


class ServerRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attention server; the load is that of `control.policy.Candidate`.

    A slot is given to another server only when no relay process can count for the one before.
    """

    slot: int
    server_id: str
    url: str
    state: str  # a `control.standing.Standing`, or UNPLACED
    reason: str
    num_reported: int = 0
    num_in_flight_then: int = 0
    max_running: int = 0
    free_kv_tokens: int = 0
    kv_tokens: int = 0


class ModelRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may get the requests for one model, and what becomes of them where nobody may."""

    slots: tuple[int, ...]
    may_wait: bool = False  # for a server that gets ready by itself
    http_status: int = 503
    reason: str = ""


class Table(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """All servers and models, in place of those of the table before.

    A request whose body says a model that `models` has not gets the row `unknown`; one that says
    none gets `unnamed`.
    """

    rows: tuple[ServerRow, ...]
    models: dict[str, ModelRow]
    unnamed: ModelRow
    unknown: ModelRow


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Accept nothing more, finish what runs, then end."""

    timeout_s: float


class Ping(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To be answered with `Pong` by the relay's event loop."""


class Pong(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The event loop turns."""


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The relay accepts connections."""


class Unreachable(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """No connection to this server could be had."""

    slot: int
    reason: str


class BrokeOff(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """This server broke off an answer, or closed the connection without one."""

    slot: int
    reason: str


class Draining(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The answer to `Drain`: nothing is accepted any more."""

    num_running: int


ToRelay = Setup | Table | Drain | Ping
ToControl = Listening | Unreachable | BrokeOff | Draining | Pong

NOBODY = ModelRow(slots=(), may_wait=True, reason="no attention server has joined a group yet")
NO_TABLE = Table(rows=(), models={}, unnamed=NOBODY, unknown=NOBODY)

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToRelay | ToControl) -> bytes:
    """The message behind its length."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
