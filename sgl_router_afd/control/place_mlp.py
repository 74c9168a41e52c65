"""Where each MLP server belongs."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from sgl_router_afd.control.group import Group, Shape, is_displaced
from sgl_router_afd.control.places import Memory, Placement, natural
from sgl_router_afd.control.registry import Entry


class Contacts:
    """Which servers report that they hear an MLP server of a group, or are heard by one."""

    def __init__(self) -> None:
        self._group_of_boot: dict[str, str] = {}  # of each MLP server
        self._hearers: dict[str, set[str]] = {}  # boot id -> groups whose MLP servers hear it

    def add(self, entry: Entry, name: str) -> None:
        self._group_of_boot[entry.boot_id] = name
        for boot_id in entry.report.attached:
            self._hearers.setdefault(boot_id, set()).add(name)

    def of(self, entry: Entry) -> list[str]:
        """Those that it hears come first: who has left is heard by the others for a while."""
        boots = entry.report.attached
        heard = {self._group_of_boot[boot] for boot in boots if boot in self._group_of_boot}
        hearers = self._hearers.get(entry.boot_id, set()) - heard
        return [*sorted(heard, key=natural), *sorted(hearers, key=natural)]


class MlpPlacer:
    """Places one after the other.

    Args:
        placement: Gets them, and new groups.
        memory: What was decided before.
    """

    def __init__(self, placement: Placement, memory: Memory) -> None:
        self.contacts = Contacts()
        self._placement = placement
        self._groups = placement.groups
        self._memory = memory
        self._at: dict[str, set[str]] = {}  # URL -> groups that have an MLP server there
        self._naming: dict[str, set[str]] = {}  # URL -> groups that say that their rank 0 is there
        self._told: set[str] = set()  # groups with a rank that was told where its rank 0 is
        # Groups that had no server of a rank, the first one first.
        self._vacant: dict[tuple[Shape, int], list[tuple[int, str]]] = {}
        self._wired_to: dict[str, list[str]] = {}  # URL -> groups that attach there by themselves
        for group in self._groups.values():
            self._offer(group)
            for url in group.shape.own_urls:
                self._wired_to.setdefault(url, []).append(group.name)

    def place(self, entry: Entry) -> None:
        shard, registration = entry.registration.shard, entry.registration
        if shard is None:
            self._placement.leave_out(entry, "a spare: it takes the first rank that is missing")
            return
        shape = Shape(
            fingerprint=registration.fingerprint,
            num_experts=registration.num_experts,
            ep_size=shard.ep_size,
        )
        if is_displaced(entry):
            self._place_displaced(entry, shard.ep_rank, shape)
            return
        for name in self._candidates(entry, shape, shard.ep_rank):
            group = self._groups.get(name)
            if group is None or self._may_take(group, entry, shape):
                group = self._open(name, shape)
            if group.shape == shape and shard.ep_rank not in group.mlp:
                self._add(group, shard.ep_rank, entry)
                return
        name = self._placement.new_name(self._memory)
        self._add(self._open(name, shape), shard.ep_rank, entry)

    def _may_take(self, group: Group, entry: Entry, shape: Shape) -> bool:
        """Its attention servers were here first, and had the group to themselves.

        Those that name this server stay with it.
        """
        is_same_model = group.shape.num_experts == shape.num_experts and (
            group.shape.fingerprint == shape.fingerprint
        )
        is_named = entry.registration.url in group.shape.own_urls
        is_claimed = group.name == self._memory.claim_of(entry)
        return group.wires_itself and is_same_model and (is_named or is_claimed)

    def _place_displaced(self, entry: Entry, rank: int, shape: Shape) -> None:
        """By a killed predecessor, whose lease at rank 0 still runs, it loses no place here."""
        group = self._groups.get(self._memory.group_of.get(entry.server_id, ""))
        if group is not None and group.shape == shape and rank not in group.mlp:
            self._add(group, rank, entry)
            return
        reason = entry.report.reason or f"another server serves rank {rank}"
        self._placement.leave_out(entry, f"displaced: {reason}")

    def _open(self, name: str, shape: Shape) -> Group:
        group = self._placement.open(name, shape)
        self._offer(group)
        return group

    def _offer(self, group: Group) -> None:
        for rank in range(group.shape.ep_size):
            heappush(self._vacant.setdefault((group.shape, rank), []), natural(group.name))

    def _add(self, group: Group, rank: int, entry: Entry) -> None:
        group.mlp[rank] = entry
        self.contacts.add(entry, group.name)
        self._at.setdefault(entry.registration.url, set()).add(group.name)
        for url in entry.registration.peer_urls:
            self._naming.setdefault(url, set()).add(group.name)
            self._told.add(group.name)

    def _candidates(self, entry: Entry, shape: Shape, rank: int) -> Iterator[str]:
        yield from self.contacts.of(entry)
        yield from self._by_address(entry)
        before = self._memory.group_of.get(entry.server_id, "") or self._memory.claim_of(entry)
        if before:
            yield before
        yield from self._wired_to.get(entry.registration.url, ())
        if not entry.registration.peer_urls:
            yield from self._first_vacant(shape, rank)

    def _first_vacant(self, shape: Shape, rank: int) -> Iterator[str]:
        """A rank that was told where its rank 0 is belongs to no other one."""
        vacant = self._vacant.get((shape, rank), [])
        while vacant:
            name = vacant[0][1]
            if name not in self._told and rank not in self._groups[name].mlp:
                yield name
                return
            heappop(vacant)

    def _by_address(self, entry: Entry) -> list[str]:
        """Groups with a server that names this one's address, is named by it, or names the same."""
        names = set(self._naming.get(entry.registration.url, ()))
        for url in entry.registration.peer_urls:
            names |= self._at.get(url, set()) | self._naming.get(url, set())
        return sorted(names, key=natural)
