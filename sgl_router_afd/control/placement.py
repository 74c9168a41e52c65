"""Which server belongs to which group; computed anew whenever somebody came, went or changed.

What is known of a server's connections decides first, then its command line, then where it was:
here, by its last lease of an earlier router, or by what that router saved. A server that none of
these places goes to where one is needed. So whoever has a place keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from sgl_router_afd.control.group import Group, Shape, is_displaced
from sgl_router_afd.control.ratio import Ratio, Size, choose_group
from sgl_router_afd.control.registry import Entry
from sglang_afd.config import Role


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What was decided before.

    Args:
        shapes: Of the groups that there were, empty ones among them.
        group_of: Where each server was, by server id.
        saved: Where an earlier router had those servers that were not here yet.
        known_names: Names that a new group must not take.
        is_settled: Whether everybody had time to register again after the router's start.
    """

    shapes: Mapping[str, Shape]
    group_of: Mapping[str, str]
    saved: Mapping[str, str] = field(default_factory=dict)
    known_names: frozenset[str] = frozenset()
    is_settled: bool = True

    def claim_of(self, entry: Entry) -> str:
        """Where an earlier router had a server: its own word is younger than what was saved."""
        return entry.registration.group or self.saved.get(entry.server_id, "")


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
    # Those that have a place keep it before others ask; rank 0 goes before the ranks it names.
    # Those that others displace take what is left.
    everybody = sorted(
        entries,
        key=lambda entry: (
            is_displaced(entry),
            entry.server_id not in memory.group_of,
            _rank(entry),
            entry.order,
        ),
    )
    placement = Placement(
        groups={name: Group(name=name, shape=shape) for name, shape in memory.shapes.items()},
        homeless={},
    )
    mlp_placer = _MlpPlacer(placement, memory)
    for entry in everybody:
        if entry.registration.role is Role.MLP:
            mlp_placer.place(entry)
    attn_placer = _AttnPlacer(placement, memory, ratio, mlp_placer.contacts)
    for entry in everybody:
        if entry.registration.role is Role.ATTN:
            attn_placer.place(entry)
    return placement


class _Contacts:
    """Which servers report that they hear an MLP server of a group, or are heard by one."""

    def __init__(self) -> None:
        self._group_of_boot: dict[str, str] = {}  # of each MLP server
        self._hearers: dict[str, set[str]] = {}  # boot id -> groups whose MLP servers hear it

    def add(self, entry: Entry, name: str) -> None:
        self._group_of_boot[entry.boot_id] = name
        for boot_id in entry.report.attached:
            self._hearers.setdefault(boot_id, set()).add(name)

    def of(self, entry: Entry) -> list[str]:
        heard = [self._group_of_boot.get(boot_id, "") for boot_id in entry.report.attached]
        names = {*heard, *self._hearers.get(entry.boot_id, ())} - {""}
        return sorted(names, key=_natural)


class _MlpPlacer:
    def __init__(self, placement: Placement, memory: Memory) -> None:
        self.contacts = _Contacts()
        self._placement = placement
        self._groups = placement.groups
        self._memory = memory
        self._at: dict[str, set[str]] = {}  # URL -> groups that have an MLP server there
        self._naming: dict[str, set[str]] = {}  # URL -> groups that say that their rank 0 is there
        self._told: set[str] = set()  # groups with a rank that was told where its rank 0 is

    def place(self, entry: Entry) -> None:
        shard, registration = entry.registration.shard, entry.registration
        if shard is None:
            _leave_out(self._placement, entry, "a spare: it takes the first rank that is missing")
            return
        shape = Shape(
            fingerprint=registration.fingerprint,
            num_experts=registration.num_experts,
            ep_size=shard.ep_size,
        )
        if is_displaced(entry):
            self._place_displaced(entry, shard.ep_rank, shape)
            return
        for name in self._candidates(entry):
            group = self._groups.get(name) or _open(self._placement, name, shape)
            if group.shape == shape and shard.ep_rank not in group.mlp:
                self._add(group, shard.ep_rank, entry)
                return
        name = _new_name(self._groups, self._memory)
        self._add(_open(self._placement, name, shape), shard.ep_rank, entry)

    def _place_displaced(self, entry: Entry, rank: int, shape: Shape) -> None:
        """By a killed predecessor, whose lease at rank 0 still runs, it loses no place here."""
        group = self._groups.get(self._memory.group_of.get(entry.server_id, ""))
        if group is not None and group.shape == shape and rank not in group.mlp:
            self._add(group, rank, entry)
            return
        reason = entry.report.reason or f"another server serves rank {rank}"
        _leave_out(self._placement, entry, f"displaced: {reason}")

    def _add(self, group: Group, rank: int, entry: Entry) -> None:
        group.mlp[rank] = entry
        self.contacts.add(entry, group.name)
        self._at.setdefault(entry.registration.url, set()).add(group.name)
        for url in entry.registration.peer_urls:
            self._naming.setdefault(url, set()).add(group.name)
            self._told.add(group.name)

    def _candidates(self, entry: Entry) -> Iterator[str]:
        yield from self.contacts.of(entry)
        yield from self._by_address(entry)
        before = self._memory.group_of.get(entry.server_id, "") or self._memory.claim_of(entry)
        if before:
            yield before
        if not entry.registration.peer_urls:
            # A rank that was told where its rank 0 is belongs to no other one.
            yield from sorted(self._groups.keys() - self._told, key=_natural)

    def _by_address(self, entry: Entry) -> list[str]:
        """Groups with a server that names this one's address, is named by it, or names the same."""
        names = set(self._naming.get(entry.registration.url, ()))
        for url in entry.registration.peer_urls:
            names |= self._at.get(url, set()) | self._naming.get(url, set())
        return sorted(names, key=_natural)


@dataclass(kw_only=True)
class _Model:
    """The groups of one model whose MLP servers register; all of these are placed."""

    groups: dict[str, Group] = field(default_factory=dict)
    led_from: dict[str, Group] = field(default_factory=dict)  # where rank 0 may be -> its group
    has_mlp: bool = False

    def add(self, group: Group) -> None:
        self.groups[group.name] = group
        self.has_mlp = self.has_mlp or bool(group.mlp)
        for url in group.mlp_urls:
            self.led_from.setdefault(url, group)


class _AttnPlacer:
    def __init__(
        self, placement: Placement, memory: Memory, ratio: Ratio | None, contacts: _Contacts
    ) -> None:
        self._placement = placement
        self._groups = placement.groups
        self._memory = memory
        self._ratio = ratio
        self._contacts = contacts
        self._speaks_for: dict[str, Entry] = {}  # of each name of a model, who said it first
        self._models: dict[tuple[str, int], _Model] = {}  # by fingerprint and number of experts
        self._self_wired: dict[Shape, Group] = {}
        for name in sorted(self._groups, key=_natural):
            group = self._groups[name]
            if group.wires_itself:
                self._self_wired.setdefault(group.shape, group)
            else:
                key = (group.shape.fingerprint, group.shape.num_experts)
                self._models.setdefault(key, _Model()).add(group)

    def place(self, entry: Entry) -> None:
        clash = self._name_clash(entry)
        if clash:
            self._leave_out(entry, clash)
            return
        registration = entry.registration
        model = self._models.get((registration.fingerprint, registration.num_experts), _Model())
        if registration.peer_urls:
            self._add(self._group_of_own_urls(entry, model), entry)
            return
        for name in self._candidates(entry):
            # A group without any MLP server holds nobody who could serve elsewhere.
            if name in model.groups and (model.groups[name].mlp or not model.has_mlp):
                self._add(model.groups[name], entry)
                return
        claim = self._memory.claim_of(entry)
        if claim and claim not in self._groups and not self._memory.is_settled:
            self._leave_out(
                entry,
                f"waits for the MLP servers of {claim} to register again with this router, which "
                "was started a moment ago",
            )
            return
        chosen = choose_group(
            (_size(group) for group in model.groups.values() if group.mlp), self._ratio
        )
        if chosen:
            self._add(model.groups[chosen], entry)
        else:
            self._leave_out(entry, self._why_no_group(entry))

    def _add(self, group: Group, entry: Entry) -> None:
        group.attn.append(entry)
        for name in entry.registration.models:
            self._speaks_for.setdefault(name, entry)

    def _candidates(self, entry: Entry) -> Iterator[str]:
        yield from self._contacts.of(entry)
        yield self._memory.group_of.get(entry.server_id, "")
        yield self._memory.claim_of(entry)

    def _group_of_own_urls(self, entry: Entry, model: _Model) -> Group:
        urls = entry.registration.peer_urls
        led = {group.name: group for url in urls if (group := model.led_from.get(url))}
        if led:
            return led[min(led, key=_natural)]
        for name in self._contacts.of(entry):
            if name in model.groups:
                return model.groups[name]
        shape = Shape(
            fingerprint=entry.registration.fingerprint,
            num_experts=entry.registration.num_experts,
            ep_size=0,
            own_urls=tuple(sorted(urls)),
        )
        if shape not in self._self_wired:
            claim = self._memory.claim_of(entry)
            is_free = claim and claim not in self._groups
            name = claim if is_free else _new_name(self._groups, self._memory)
            self._self_wired[shape] = _open(self._placement, name, shape)
        return self._self_wired[shape]

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
        others = sorted({key[0][:12] for key, model in self._models.items() if model.has_mlp})
        if others:
            return (
                f"no MLP server has its model ({ours}); those registered have {', '.join(others)}: "
                "start both roles with the same checkpoint"
            )
        return f"no MLP server of its model ({ours}) has registered; start one with --role mlp"

    def _leave_out(self, entry: Entry, reason: str) -> None:
        _leave_out(self._placement, entry, reason)


def _open(placement: Placement, name: str, shape: Shape) -> Group:
    placement.groups[name] = Group(name=name, shape=shape)
    return placement.groups[name]


def _new_name(groups: Mapping[str, Group], memory: Memory) -> str:
    number = 1
    while (name := f"group-{number}") in groups or name in memory.known_names:
        number += 1
    return name


def _leave_out(placement: Placement, entry: Entry, reason: str) -> None:
    placement.homeless[entry.server_id] = reason


def _size(group: Group) -> Size:
    return Size(
        name=group.name,
        num_attn=len(group.attn),
        num_mlp=group.shape.ep_size,
        is_covered=not group.gap,
    )


def _rank(entry: Entry) -> int:
    shard = entry.registration.shard
    return shard.ep_rank if shard is not None else -1


def _natural(name: str) -> tuple[int, str]:
    return (len(name), name)
