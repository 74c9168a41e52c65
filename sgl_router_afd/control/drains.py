"""What operators asked to drain. It is in force until they take it back, also for who is away.

A drain of a server is one of that process: the next one of its name is what the drain was for.
"""

from __future__ import annotations

from collections.abc import Mapping

from sgl_router_afd.control.persist import SavedDrain


class Drains:
    """
    Args:
        servers: By server id.
        groups: The reason of each, by name.
    """

    def __init__(self, servers: Mapping[str, SavedDrain], groups: Mapping[str, str]) -> None:
        self.servers = dict(servers)
        self.groups = dict(groups)

    def ask(self, server_id: str, boot_id: str, reason: str) -> None:
        """Drain a process; an empty reason takes that back."""
        self.servers.pop(server_id, None)
        if reason:
            self.servers[server_id] = SavedDrain(boot_id=boot_id, reason=reason)

    def ask_group(self, name: str, reason: str) -> None:
        """The same for a group."""
        self.groups.pop(name, None)
        if reason:
            self.groups[name] = reason

    def take_over(self, server_id: str, boot_id: str) -> str:
        """A process registers: why it drains, "" if nobody asked for that; not so one before it."""
        drain = self.servers.get(server_id)
        if drain is not None and drain.boot_id != boot_id:
            del self.servers[server_id]
            return ""
        return drain.reason if drain is not None else ""

    def of_group(self, name: str) -> str:
        return self.groups.get(name, "")
