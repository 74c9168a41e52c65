"""One endpoint: who may call it, what it takes and answers; served and documented from here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access(Enum):
    """Who may call."""

    OPEN = auto()  # everybody
    CLIENT = auto()  # who knows the client key, if there is one
    READ = auto()  # who knows the admin key, if there is one
    CHANGE = auto()  # who knows the admin key; without one, whoever reaches a loopback address
    SERVER = auto()  # who signs with the servers' secret, if there is one


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A method of a path."""

    method: str
    path: str  # as aiohttp and OpenAPI write it: /afd/v1/servers/{server_id}
    handler: Handler
    access: Access
    summary: str
    answers: Mapping[int, Any]  # by HTTP status, a struct or a union of structs; None: no body
    takes: Any = None  # the struct of the request's body
    needs_body: bool = True
    query: Mapping[str, str] = field(default_factory=dict)  # parameters and what they mean
    errors: tuple[int, ...] = ()  # statuses with an error, beside those of `access`
