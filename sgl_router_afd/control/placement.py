"""Which server belongs to which group; computed anew whenever somebody came, went or changed.

What is known of a server's connections decides first, then its command line, then where it was:
here, or by its last lease of an earlier router. A server that none of these places goes to where
one is needed. So whoever has a place keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sgl_router_afd.control.ratio import Ratio, Size, choose_group
from sgl_router_afd.control.registry import Entry
from sglang_afd.config import Role
from sglang_afd.errors import ConfigError
from sglang_afd.protocol.registration import Condition
from sglang_afd.topology import check_coverage


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all servers of a group must agree on."""

    fingerprint: str
    num_experts: int
    ep_size: int  # 0: its MLP servers are not registered, its attention servers know them
    own_urls: tuple[str, ...] = ()  # of those MLP servers then


@dataclass(kw_only=True)
class Group:
    """Who belongs together."""

    name: str
    shape: Shape
    mlp: dict[int, Entry] = field(default_factory=dict)  # by rank
    attn: list[Entry] = field(default_factory=list)

    @property
    def wires_itself(self) -> bool:
        """Do its attention servers attach to MLP servers that the router does not know?"""
        return self.shape.ep_size == 0

    @cached_property
    def boot_ids(self) -> frozenset[str]:
        """The processes of its MLP servers; to be asked for when all are placed."""
        return frozenset(entry.boot_id for entry in self.mlp.values())

    def servers(self) -> list[Entry]:
        return [*(entry for _, entry in sorted(self.mlp.items())), *self.attn]

    def gap(self) -> str:
        """What keeps its experts from being covered, for people; "" if they are."""
        if self.wires_itself:
            return ""
        missing = [str(rank) for rank in range(self.shape.ep_size) if rank not in self.mlp]
        if missing:
            return (
                f"of its {self.shape.ep_size} MLP servers rank {', '.join(missing)} is not there; "
                "start it with the same --ep-size"
            )
        for rank, entry in sorted(self.mlp.items()):
            if _is_displaced(entry):
                return f"MLP server {entry.server_id} waits for rank {rank}: {entry.report.reason}"
            is_loading = entry.report.condition is Condition.LOADING
            if is_loading or not entry.registration.exchange_address:
                return f"MLP server {entry.server_id} loads the experts of rank {rank}"
        try:
            check_coverage(self.ranges(), self.shape.num_experts)
        except ConfigError as error:
            return str(error)
        return ""

    def ranges(self) -> list[tuple[int, int]]:
        shards = [entry.registration.shard for entry in self.mlp.values()]
        return [(shard.first_expert, shard.stop_expert) for shard in shards if shard is not None]

    def mlp_urls(self) -> tuple[str, ...]:
        """Where its rank 0 may be; empty if only the attention servers know."""
        if 0 in self.mlp:
            leader = self.mlp[0].registration
            return tuple(dict.fromkeys((leader.url, *leader.peer_urls)))
        others = [entry.registration for _, entry in sorted(self.mlp.items())]
        return tuple(dict.fromkeys(url for other in others for url in other.peer_urls))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What was decided before.

    Args:
        shapes: Of the groups that there were, empty ones among them.
        group_of: Where each server was, by server id.
        known_names: Names that a new group must not take.
        is_settled: Whether everybody had time to register again after the router's start.
    """

    shapes: Mapping[str, Shape]
    group_of: Mapping[str, str]
    known_names: frozenset[str] = frozenset()
    is_settled: bool = True


@dataclass(kw_only=True)
class Placement:
    """The groups, and why a server is in none."""

    groups: dict[str, Group]
    homeless: dict[str, str]  # server id -> reason, for people


def place(entries: Iterable[Entry], memory: Memory, ratio: Ratio | None) -> Placement:
    """Put every server into one group, or say why it is in none.

    Args:
        entries: In the order of their registration.
        memory: What was decided before.
        ratio: Attention to MLP servers, or None to keep groups even.
    """
    placer = _Placer(memory, ratio)
    # Those that have a place keep it before others ask; rank 0 goes before the ranks it names.
    # Those that others displace take what is left.
    everybody = sorted(
        entries,
        key=lambda entry: (
            _is_displaced(entry),
            entry.server_id not in memory.group_of,
            _rank(entry),
            entry.order,
        ),
    )
    for entry in everybody:
        if entry.registration.role is Role.MLP:
            placer.place_mlp(entry)
    for entry in everybody:
        if entry.registration.role is Role.ATTN:
            placer.place_attn(entry)
    return placer.placement


class _Placer:
    def __init__(self, memory: Memory, ratio: Ratio | None) -> None:
        self._memory = memory
        self._ratio = ratio
        groups = {name: Group(name=name, shape=shape) for name, shape in memory.shapes.items()}
        self.placement = Placement(groups=groups, homeless={})
        self._groups = groups
        self._group_of_boot: dict[str, str] = {}  # of each MLP server
        self._hearers: dict[str, set[str]] = {}  # boot id -> groups whose MLP servers hear it
        self._speaks_for: dict[str, Entry] = {}  # of each name of a model, who said it first

    def place_mlp(self, entry: Entry) -> None:
        shard = entry.registration.shard
        if shard is None:
            self._leave_out(entry, "a spare: it takes the first rank that is missing")
            return
        shape = _shape(entry, shard.ep_size)
        if _is_displaced(entry):
            self._place_displaced(entry, shard.ep_rank, shape)
            return
        for name in self._mlp_candidates(entry):
            group = self._groups.get(name) or self._open(name, shape)
            if group.shape == shape and shard.ep_rank not in group.mlp:
                self._add_mlp(group, shard.ep_rank, entry)
                return
        self._add_mlp(self._open(self._new_name(), shape), shard.ep_rank, entry)

    def _place_displaced(self, entry: Entry, rank: int, shape: Shape) -> None:
        """By a killed predecessor, whose lease at rank 0 still runs, it loses no place here."""
        group = self._groups.get(self._memory.group_of.get(entry.server_id, ""))
        if group is not None and group.shape == shape and rank not in group.mlp:
            self._add_mlp(group, rank, entry)
            return
        reason = entry.report.reason or f"another server serves rank {rank}"
        self._leave_out(entry, f"displaced: {reason}")

    def place_attn(self, entry: Entry) -> None:
        clash = self._name_clash(entry)
        if clash:
            self._leave_out(entry, clash)
            return
        registration = entry.registration
        if registration.peer_urls:
            self._add_attn(self._group_of_own_urls(entry), entry)
            return
        same_model = {group.name: group for group in self._same_model(entry)}
        for name in self._attn_candidates(entry):
            if name in same_model and self._may_stay(same_model[name], same_model):
                self._add_attn(same_model[name], entry)
                return
        is_awaited = registration.group and registration.group not in self._groups
        if is_awaited and not self._memory.is_settled:
            self._leave_out(
                entry,
                f"waits for the MLP servers of {registration.group} to register again with this "
                "router, which was started a moment ago",
            )
            return
        sizes = [_size(group) for group in same_model.values() if group.mlp]
        chosen = choose_group(sizes, self._ratio)
        if chosen:
            self._add_attn(same_model[chosen], entry)
        else:
            self._leave_out(entry, self._why_no_group(entry))

    def _add_mlp(self, group: Group, rank: int, entry: Entry) -> None:
        group.mlp[rank] = entry
        self._group_of_boot[entry.boot_id] = group.name
        for boot_id in entry.report.attached:
            self._hearers.setdefault(boot_id, set()).add(group.name)

    def _add_attn(self, group: Group, entry: Entry) -> None:
        group.attn.append(entry)
        for name in entry.registration.models:
            self._speaks_for.setdefault(name, entry)

    def _mlp_candidates(self, entry: Entry) -> Iterator[str]:
        yield from self._in_contact(entry)
        for group in self._by_name():
            if any(_names(entry, other) for other in group.mlp.values()):
                yield group.name
        remembered = self._memory.group_of.get(entry.server_id, "") or entry.registration.group
        if remembered:
            yield remembered
        if not entry.registration.peer_urls:
            for group in self._by_name():
                # A rank that was told where its rank 0 is belongs to no other one.
                if not any(other.registration.peer_urls for other in group.mlp.values()):
                    yield group.name

    def _attn_candidates(self, entry: Entry) -> Iterator[str]:
        yield from self._in_contact(entry)
        yield self._memory.group_of.get(entry.server_id, "")
        yield entry.registration.group

    def _in_contact(self, entry: Entry) -> list[str]:
        """Groups whose MLP servers and this server report that they hear each other."""
        heard = [self._group_of_boot.get(boot_id, "") for boot_id in entry.report.attached]
        names = {*heard, *self._hearers.get(entry.boot_id, ())} - {""}
        return sorted(names, key=_natural)

    def _may_stay(self, group: Group, same_model: Mapping[str, Group]) -> bool:
        """A group without any MLP server holds nobody who could serve elsewhere."""
        return bool(group.mlp) or not any(other.mlp for other in same_model.values())

    def _group_of_own_urls(self, entry: Entry) -> Group:
        urls = entry.registration.peer_urls
        for group in self._same_model(entry):
            if set(urls) & set(group.mlp_urls()):
                return group
        in_contact = self._in_contact(entry)
        for group in self._same_model(entry):
            if group.name in in_contact:
                return group
        shape = Shape(
            fingerprint=entry.registration.fingerprint,
            num_experts=entry.registration.num_experts,
            ep_size=0,
            own_urls=tuple(sorted(urls)),
        )
        for group in self._by_name():
            if group.shape == shape:
                return group
        claimed = entry.registration.group
        free = claimed if claimed and claimed not in self._groups else self._new_name()
        return self._open(free, shape)

    def _same_model(self, entry: Entry) -> list[Group]:
        registration = entry.registration
        return [
            group
            for group in self._by_name()
            if not group.wires_itself
            and group.shape.fingerprint == registration.fingerprint
            and group.shape.num_experts == registration.num_experts
        ]

    def _name_clash(self, entry: Entry) -> str:
        registration = entry.registration
        for name in registration.models:
            other = self._speaks_for.get(name, entry)
            if other.registration.fingerprint != registration.fingerprint:
                return (
                    f"{other.server_id} serves another model "
                    f"({other.registration.fingerprint[:12]}) as {name!r} than this server "
                    f"({registration.fingerprint[:12]}); give this one another --served-model-name"
                )
        return ""

    def _why_no_group(self, entry: Entry) -> str:
        ours = entry.registration.fingerprint[:12]
        others = sorted(
            {group.shape.fingerprint[:12] for group in self._groups.values() if group.mlp}
        )
        if others:
            return (
                f"no MLP server has its model ({ours}); those registered have {', '.join(others)}: "
                "start both roles with the same checkpoint"
            )
        return f"no MLP server of its model ({ours}) has registered; start one with --role mlp"

    def _by_name(self) -> list[Group]:
        return [self._groups[name] for name in sorted(self._groups, key=_natural)]

    def _open(self, name: str, shape: Shape) -> Group:
        group = Group(name=name, shape=shape)
        self._groups[group.name] = group
        return group

    def _new_name(self) -> str:
        taken = self._groups.keys() | self._memory.known_names
        number = 1
        while f"group-{number}" in taken:
            number += 1
        return f"group-{number}"

    def _leave_out(self, entry: Entry, reason: str) -> None:
        self.placement.homeless[entry.server_id] = reason


def _is_displaced(entry: Entry) -> bool:
    return entry.report.condition is Condition.DISPLACED


def _shape(entry: Entry, ep_size: int) -> Shape:
    registration = entry.registration
    return Shape(
        fingerprint=registration.fingerprint, num_experts=registration.num_experts, ep_size=ep_size
    )


def _size(group: Group) -> Size:
    return Size(
        name=group.name,
        num_attn=len(group.attn),
        num_mlp=group.shape.ep_size,
        is_covered=not group.gap(),
    )


def _names(entry: Entry, other: Entry) -> bool:
    """Does one of two MLP servers name the other's address, or both the same one?"""
    ours, theirs = entry.registration, other.registration
    return (
        ours.url in theirs.peer_urls
        or theirs.url in ours.peer_urls
        or bool(set(ours.peer_urls) & set(theirs.peer_urls))
    )


def _rank(entry: Entry) -> int:
    shard = entry.registration.shard
    return shard.ep_rank if shard is not None else -1


def _natural(name: str) -> tuple[int, str]:
    return (len(name), name)
