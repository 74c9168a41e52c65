"""What placing servers starts from, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sgl_router_afd.control.group import Group, Shape
from sgl_router_afd.control.registry import Entry


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What was decided before.

    Args:
        shapes: Of the groups that there were, empty ones among them.
        group_of: Where each server was, by server id.
        saved: Where an earlier router had those servers that were not here yet.
        speaks_for: Which model each name of a model meant, as its fingerprint.
        saved_models: The same under an earlier router.
        known_names: Names that a new group must not take.
        is_settled: Whether everybody had time to register again after the router's start.
    """

    shapes: Mapping[str, Shape]
    group_of: Mapping[str, str]
    saved: Mapping[str, str] = field(default_factory=dict)
    speaks_for: Mapping[str, str] = field(default_factory=dict)
    saved_models: Mapping[str, str] = field(default_factory=dict)
    known_names: frozenset[str] = frozenset()
    is_settled: bool = True

    def claim_of(self, entry: Entry) -> str:
        """Where an earlier router had a server: its own word is younger than what was saved."""
        return entry.registration.group or self.saved.get(entry.server_id, "")

    def is_usurper(self, entry: Entry) -> bool:
        """Does it say a name that another model had?"""
        ours, held = entry.registration.fingerprint, self.speaks_for
        return any(held.get(name, ours) != ours for name in entry.registration.models)


@dataclass(kw_only=True)
class Placement:
    """The groups, and why a server is in none."""

    groups: dict[str, Group]
    homeless: dict[str, str]  # server id -> reason, for people
    next_number: int = 1  # those before it are taken

    def open(self, name: str, shape: Shape) -> Group:
        """A new group; one of that name is no more."""
        self.groups[name] = Group(name=name, shape=shape)
        return self.groups[name]

    def new_name(self, memory: Memory) -> str:
        while (name := f"group-{self.next_number}") in self.groups or name in memory.known_names:
            self.next_number += 1
        return name

    def leave_out(self, entry: Entry, reason: str) -> None:
        self.homeless[entry.server_id] = reason


def natural(name: str) -> tuple[int, str]:
    """Sorts group-2 before group-10."""
    return (len(name), name)
