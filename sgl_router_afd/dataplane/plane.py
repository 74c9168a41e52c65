"""What the router needs of whatever relays requests."""

from __future__ import annotations

from typing import Protocol

from sgl_router_afd.dataplane.messages import Table


class DataPlane(Protocol):
    """It runs while a `with` block does; when it cannot be kept running, the block ends, too."""

    async def wait_until_listening(self) -> None:
        """Return once clients are accepted."""

    def publish(self, table: Table) -> None:
        """Make this what decides where requests go, also after a part of it was restarted."""

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing more, and return when running requests have finished or been cut."""
