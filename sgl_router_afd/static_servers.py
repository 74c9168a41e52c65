"""Servers that do not register themselves: what they answer, put to the control plane (no I/O).

The router asks each of them what it would register with, and registers and renews on its behalf. So
there is one way in, and one set of states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.registry import Entry
from sglang_afd.config import Role
from sglang_afd.errors import ProtocolError, Refused
from sglang_afd.protocol.paths import REGISTRATION_PATH
from sglang_afd.protocol.registration import (
    REGISTRATION_VERSION,
    Registration,
    Renewal,
    decode_to_router,
)

FLAG_OF = {Role.ATTN: "--attn", Role.MLP: "--mlp"}


@dataclass(kw_only=True)
class StaticServer:
    """One URL that the router was given; changed only by `StaticServers`."""

    url: str
    role: Role
    reason: str = "not asked yet"  # why it is not there; of the last answer
    server_id: str = ""  # of its last answer
    boot_id: str = ""
    lease_id: str = ""  # of what the router got on its behalf
    is_refusing: bool = False  # the last connection was refused


class StaticServers:
    """Takes the answers, and tells the control plane.

    Args:
        plane: Registers them.
        clock: The plane's.
        changed: Called after anything that changed the plane.
    """

    def __init__(
        self, plane: ControlPlane, clock: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        self._plane = plane
        self._clock = clock
        self._changed = changed
        self._servers: dict[str, StaticServer] = {}
        self._url_of_lease: dict[str, str] = {}
        self._on_urls: Callable[[], None] = lambda: None

    def on_urls(self, call: Callable[[], None]) -> None:
        """Call this whenever a URL is added or removed."""
        self._on_urls = call

    def all(self) -> tuple[StaticServer, ...]:
        return tuple(self._servers.values())

    def add(self, role: Role, url: str) -> bool:
        """Ask this URL from now on; returns whether it is new."""
        if url in self._servers:
            return False
        self._servers[url] = StaticServer(url=url, role=role)
        self._on_urls()
        return True

    def remove(self, url: str) -> bool:
        """Ask it no more; returns whether it was asked. Its lease is left to the caller."""
        static = self._servers.pop(url, None)
        if static is None:
            return False
        self._url_of_lease.pop(static.lease_id, None)
        self._on_urls()
        return True

    def url_of(self, server_id: str) -> str:
        """The URL of the server whose lease is one that was taken on its behalf; else empty."""
        entry = self._plane.registry.get(server_id)
        return self._url_of_lease.get(entry.lease_id, "") if entry is not None else ""

    def unheard(self) -> tuple[tuple[str, str], ...]:
        """URL and reason of each that is not registered now."""
        return tuple(
            (static.url, static.reason)
            for static in self._servers.values()
            if self._is_away(static)
        )

    def on_answer(self, static: StaticServer, http_status: int, body: bytes) -> None:
        """The server answered; never raises, whatever it sent."""
        static.is_refusing = False
        try:
            registration = _read(static, http_status, body)
            self._take(static, registration)
        except (Refused, ProtocolError) as error:
            self._say(static, str(error))
        else:
            self._say(static, "")

    def on_refusal(self, static: StaticServer, reason: str) -> None:
        """No connection can be had. That is news once, not at every poll."""
        self._say(static, reason)
        if not static.is_refusing:
            static.is_refusing = True
            if self.url_of(static.server_id):
                self._plane.on_trouble(static.server_id, reason, self._clock(), is_certain=True)
                self._changed()

    def on_silence(self, static: StaticServer, reason: str) -> None:
        """It left a question unanswered: its lease runs out if that goes on."""
        self._say(static, reason)

    def _say(self, static: StaticServer, reason: str) -> None:
        if static.reason != reason:
            static.reason = reason
            self._changed()

    def _take(self, static: StaticServer, registration: Registration) -> None:
        now_s = self._clock()
        entry = self._plane.registry.get(registration.server_id)
        is_held = entry is not None and entry.boot_id == registration.boot_id
        if is_held and entry is not None and not _holds(static, entry):
            # It registers by itself, or another URL leads to it.
            static.server_id, static.boot_id = registration.server_id, registration.boot_id
            return
        if entry is not None and is_held and _says_the_same(registration, entry):
            self._plane.renew(_renewal(registration, static.lease_id), now_s)
        else:
            lease_id = self._plane.register(registration, now_s).lease_id
            self._url_of_lease.pop(static.lease_id, None)
            static.lease_id = lease_id
            self._url_of_lease[lease_id] = static.url
            static.server_id, static.boot_id = registration.server_id, registration.boot_id
        self._changed()

    def _is_away(self, static: StaticServer) -> bool:
        entry = self._plane.registry.get(static.server_id)
        return entry is None or entry.boot_id != static.boot_id


def _says_the_same(registration: Registration, entry: Entry) -> bool:
    """Who it is, but for its report; a rank that loads does not know its address for rows yet."""
    known = entry.registration
    return known == msgspec.structs.replace(
        registration, report=known.report, sent_at_s=known.sent_at_s
    )


def _holds(static: StaticServer, entry: Entry) -> bool:
    return static.lease_id == entry.lease_id


def _read(static: StaticServer, http_status: int, body: bytes) -> Registration:
    """The registration in an answer, with the URL that this router was given.

    Raises:
        ProtocolError: There is none, or it is of the other role.
        Refused: It is of another version.
    """
    if http_status == 404:
        raise ProtocolError(
            f"not an sglang-afd server (or an older one): it has no {REGISTRATION_PATH}; start it "
            f"with python -m sglang_afd.launch_server --role {static.role}"
        )
    if http_status != 200:
        said = body[:200].decode(errors="replace")
        raise ProtocolError(f"GET {REGISTRATION_PATH} answered {http_status}, wanted 200: {said}")
    message = decode_to_router(body)
    if not isinstance(message, Registration):
        raise ProtocolError(f"GET {REGISTRATION_PATH} answered something else than a registration")
    if message.role is not static.role:
        raise ProtocolError(
            f"its role is {message.role!s}, and {FLAG_OF[static.role]} is for servers of role "
            f"{static.role!s}; give it with {FLAG_OF[message.role]}"
        )
    return msgspec.structs.replace(message, url=static.url)


def _renewal(registration: Registration, lease_id: str) -> Renewal:
    return Renewal(
        version=REGISTRATION_VERSION,
        server_id=registration.server_id,
        boot_id=registration.boot_id,
        lease_id=lease_id,
        sent_at_s=registration.sent_at_s,
        report=registration.report,
    )
