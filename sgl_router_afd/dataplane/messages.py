"""What the control process and a relay process tell each other, and how it goes on the wire."""

from __future__ import annotations

import msgspec

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.readiness import ServerState

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
LENGTH_BYTES = 4


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The first message to a relay process."""

    config: RouterConfig
    relay: int  # 0 .. config.num_relays - 1
    control_path: str  # the Unix socket of the router's own endpoints


class ServerRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server; its slot is never given to another one."""

    slot: int
    url: str
    state: ServerState
    reason: str


class Table(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """All servers, in place of those of the table before."""

    rows: tuple[ServerRow, ...]


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Accept nothing more, finish what runs, then end."""

    timeout_s: float


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The relay accepts connections."""


class Unreachable(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """No connection to this server could be had."""

    slot: int
    reason: str


class Draining(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The answer to `Drain`: nothing is accepted any more."""

    num_running: int


ToRelay = Setup | Table | Drain
ToControl = Listening | Unreachable | Draining

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToRelay | ToControl) -> bytes:
    """The message behind its length."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
