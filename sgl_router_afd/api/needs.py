"""What the API needs of the fleet."""

from __future__ import annotations

from typing import Protocol

from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.traffic import Traffic
from sglang_afd.config import Role


class Fleet(Protocol):
    """The control plane at work; `sgl_router_afd.fleet.Fleet` is one."""

    @property
    def plane(self) -> ControlPlane: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def started_s(self) -> float: ...

    def now_s(self) -> float:
        """The plane's clock."""

    def changed(self) -> None:
        """Tell everybody that the plane was changed."""

    def traffic(self, server_id: str) -> Traffic:
        """What this router has at a server."""

    def num_requests_in_flight(self) -> int:
        """Requests at servers, all together."""

    def num_requests_waiting(self) -> int:
        """Requests that wait to be let in, or for a server."""

    def is_static(self, server_id: str) -> bool:
        """Is the server one that the router asks, rather than one that registered itself?"""

    def statics(self) -> tuple[tuple[str, Role], ...]:
        """All addresses that the router asks, with the role that it expects there."""

    def unheard(self) -> tuple[tuple[str, str], ...]:
        """Those of them that never answered, and why."""

    def add_static(self, url: str, role: Role) -> None:
        """Ask this address, too."""

    def remove_static(self, url: str) -> bool:
        """Ask it no more, and forget its server; returns whether it was asked."""
