"""Where each attention server belongs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sgl_router_afd.control.group import Group, Shape
from sgl_router_afd.control.place_mlp import Contacts
from sgl_router_afd.control.places import Memory, Placement, natural
from sgl_router_afd.control.ratio import Choice, Ratio, Size
from sgl_router_afd.control.registry import Entry


@dataclass(kw_only=True)
class _Model:
    """The groups of one model whose MLP servers register; all of these are placed."""

    choice: Choice
    groups: dict[str, Group] = field(default_factory=dict)
    led_from: dict[str, Group] = field(default_factory=dict)  # where rank 0 may be -> its group
    has_mlp: bool = False

    def add(self, group: Group) -> None:
        self.groups[group.name] = group
        self.has_mlp = self.has_mlp or bool(group.mlp)
        for url in group.mlp_urls:
            self.led_from.setdefault(url, group)


class AttnPlacer:
    """Places one after the other, when all MLP servers are placed.

    Args:
        placement: Has those, and gets these.
        memory: What was decided before.
        ratio: Attention to MLP servers, or None to keep groups even.
        contacts: Of the MLP servers.
    """

    def __init__(
        self, placement: Placement, memory: Memory, ratio: Ratio | None, contacts: Contacts
    ) -> None:
        self._placement = placement
        self._groups = placement.groups
        self._memory = memory
        self._contacts = contacts
        self._speaks_for: dict[str, Entry] = {}  # of each name of a model, who said it first
        self._models: dict[tuple[str, int], _Model] = {}  # by fingerprint and number of experts
        self._self_wired: dict[Shape, Group] = {}
        of_model: dict[tuple[str, int], list[Group]] = {}
        for name in sorted(self._groups, key=natural):
            group = self._groups[name]
            if group.wires_itself:
                self._self_wired.setdefault(group.shape, group)
            else:
                of_model.setdefault(_key(group.shape), []).append(group)
        for key, groups in of_model.items():
            choice = Choice((_size(group) for group in groups if group.mlp), ratio)
            self._models[key] = _Model(choice=choice)
            for group in groups:
                self._models[key].add(group)

    def place(self, entry: Entry) -> None:
        clash = self._name_clash(entry)
        if clash:
            self._placement.leave_out(entry, clash)
            return
        registration = entry.registration
        key = (registration.fingerprint, registration.num_experts)
        model = self._models.get(key) or _Model(choice=Choice((), None))
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
            self._placement.leave_out(
                entry,
                f"waits for the MLP servers of {claim} to register again with this router, which "
                "was started a moment ago",
            )
            return
        chosen = model.choice.best()
        if chosen:
            self._add(model.groups[chosen], entry)
        else:
            self._placement.leave_out(entry, self._why_no_group(entry))

    def _add(self, group: Group, entry: Entry) -> None:
        group.attn.append(entry)
        if not group.wires_itself:
            self._models[_key(group.shape)].choice.count(group.name)
        for name in entry.registration.models:
            self._speaks_for.setdefault(name, entry)

    def _candidates(self, entry: Entry) -> Iterator[str]:
        yield from self._contacts.of(entry)
        yield self._memory.group_of.get(entry.server_id, "")
        yield self._memory.claim_of(entry)

    def _group_of_own_urls(self, entry: Entry, model: _Model) -> Group:
        for name in self._candidates_by_own_urls(entry, model):
            if name in model.groups:
                return model.groups[name]
        shape = Shape(
            fingerprint=entry.registration.fingerprint,
            num_experts=entry.registration.num_experts,
            ep_size=0,
            own_urls=tuple(sorted(entry.registration.peer_urls)),
        )
        if shape not in self._self_wired:
            claim = self._memory.claim_of(entry)
            is_free = claim and claim not in self._groups
            name = claim if is_free else self._placement.new_name(self._memory)
            self._self_wired[shape] = self._placement.open(name, shape)
        return self._self_wired[shape]

    def _candidates_by_own_urls(self, entry: Entry, model: _Model) -> Iterator[str]:
        yield from self._contacts.of(entry)
        before = self._memory.group_of.get(entry.server_id, "")
        urls = entry.registration.peer_urls
        led = {group.name for url in urls if (group := model.led_from.get(url))}
        yield from sorted(led, key=lambda name: (name != before, natural(name)))
        if not entry.report.attached:
            # While it stalls it keeps its place, though it calls its MLP servers otherwise.
            yield before
            yield self._memory.claim_of(entry)

    def _name_clash(self, entry: Entry) -> str:
        registration = entry.registration
        for name in registration.models:
            before = self._memory.saved_models.get(name, registration.fingerprint)
            if before != registration.fingerprint and not self._memory.is_settled:
                return (
                    f"another model ({before[:12]}) was served as {name!r} before this router was "
                    "started a moment ago, and its servers may register again; give this one "
                    "another --served-model-name"
                )
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


def _key(shape: Shape) -> tuple[str, int]:
    return (shape.fingerprint, shape.num_experts)


def _size(group: Group) -> Size:
    return Size(
        name=group.name,
        num_attn=len(group.attn),
        num_mlp=group.shape.ep_size,
        is_whole=group.is_whole,
    )
