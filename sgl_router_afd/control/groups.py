"""The groups over time: their members, epochs and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from sgl_router_afd.control.group import Group
from sgl_router_afd.control.ledger import FORGET_S, Ledger
from sgl_router_afd.control.placement import place
from sgl_router_afd.control.places import Memory
from sgl_router_afd.control.probe import Proof
from sgl_router_afd.control.ratio import Ratio
from sgl_router_afd.control.registry import Entry
from sgl_router_afd.control.standing import (
    GroupStand,
    GroupState,
    Past,
    Stand,
    Standing,
    stand_of_attn,
    stand_of_group,
    stand_of_mlp,
    stands_where_all_drain,
)
from sglang_afd.config import Role

# What comes after these needs nobody's help, so that requests can wait for it.
PASSING = (GroupState.WIRING, GroupState.DEGRADED)

NO_CHANGES = (
    "nobody joins a group while the router cannot write its --state-file; its log and GET "
    "/readiness say why"
)

Members = frozenset[tuple[str, str]]  # server id and boot id of each


@dataclass(frozen=True, kw_only=True)
class View:
    """One group now."""

    group: Group
    epoch: int
    stand: GroupStand
    stands: dict[str, Stand]  # of its servers, by server id
    drain_reason: str  # who asked all of it to drain; "" nobody
    models: tuple[str, ...]  # names that requests for it may say; those of before if none is there
    may_recover: bool  # soon, so that requests can wait for it

    @property
    def name(self) -> str:
        return self.group.name

    def with_traffic(self) -> list[Entry]:
        """The servers that may get requests now."""
        if self.stand.state is not GroupState.READY:
            return []
        return [
            entry
            for entry in self.group.attn
            if self.stands[entry.server_id].standing is Standing.SERVING
        ]


@dataclass(kw_only=True)
class _Record:
    members: Members = frozenset()
    past: Past = field(default_factory=Past)
    models: tuple[str, ...] = ()
    was_there: bool = False  # under an earlier router
    has_moved: bool = False  # its last servers are in other groups now
    empty_since_s: float | None = None
    dead_since_s: float | None = None


class Groups:
    """Decides anew at each `update`; times are handed in.

    Args:
        ledger: Saves every epoch before it is shown here.
        ratio: Attention to MLP servers, or None.
        started_s: When this router began.
        settle_s: How long servers have to register again after that.
        hold_s: How long requests wait for a group whose servers all left a moment ago.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        ratio: Ratio | None,
        started_s: float,
        settle_s: float,
        hold_s: float,
    ) -> None:
        self.is_settled = False  # had everybody time to register again?
        self._ledger = ledger
        self._epochs = ledger.epochs
        self._ratio = ratio
        self._started_s = started_s
        self._settle_s = settle_s
        self._hold_s = hold_s
        self._records: dict[str, _Record] = {}
        self.views: dict[str, View] = {}
        self.homeless: dict[str, str] = {}
        self._group_of: dict[str, str] = {}  # of each server of `views`

    def update(
        self,
        entries: Sequence[Entry],
        proof_of: Callable[[str], tuple[Proof, str]],
        now_s: float,
    ) -> None:
        """Take what is known now.

        Args:
            entries: The registered servers, in the order of their registration.
            proof_of: What is known of an attention server's pair.
            now_s: The time.

        Raises:
            ConfigError: An epoch cannot be saved; all stays as it was, and `keep` is called for.
        """
        self.is_settled = now_s >= self._started_s + self._settle_s
        memory = Memory(
            shapes={name: view.group.shape for name, view in self.views.items()},
            group_of=self._group_of,
            saved=self._ledger.unseen,
            speaks_for=_speaks_for(self.views),
            saved_models=self._ledger.saved_models,
            known_names=self._epochs.known_names() - self._untold(),
            is_settled=self.is_settled,
        )
        placement = place(entries, memory, self._ratio)
        group_of = {
            entry.server_id: name
            for name, group in placement.groups.items()
            for entry in group.servers()
        }
        views = {}
        for name, group in placement.groups.items():
            record = self._record(name)
            self._count_members(group, record, group_of.keys())
            view = self._view(group, record, proof_of, now_s)
            if not self._is_forgotten(view, record, now_s):
                views[name] = view
        gone = self._records.keys() - views.keys()
        # Of an earlier router's group that nobody heard of here yet others may come back.
        forgotten = {
            name for name in gone if name in self.views or not self._records[name].was_there
        }
        for name in gone:
            del self._records[name]
        if now_s >= self._started_s + FORGET_S:
            forgotten |= self._epochs.known_names() - views.keys()
        self._ledger.forget_groups(forgotten)
        self._ledger.note_places(group_of)
        self._ledger.note_models(_speaks_for(views), is_settled=self.is_settled)
        self._ledger.save_epochs()
        self._ledger.note_seen(group_of.keys())
        self.views, self.homeless, self._group_of = views, placement.homeless, group_of

    def keep(
        self,
        entries: Sequence[Entry],
        now_of: Callable[[Entry], Entry],
        proof_of: Callable[[str], tuple[Proof, str]],
        now_s: float,
    ) -> None:
        """Leave members and epochs as they were told last, and look how the members stand now.

        Whoever drains, stalls or is late must not get requests because a disk is full.
        """
        for name, view in self.views.items():
            record = self._records.get(name, _Record())  # without one it is forgotten already
            now = self._view(view.group.kept(now_of), record, proof_of, now_s)
            self.views[name] = replace(now, epoch=view.epoch)
        self.homeless = {
            entry.server_id: self.homeless.get(entry.server_id, NO_CHANGES)
            for entry in entries
            if entry.server_id not in self._group_of
        }

    def drain(self, name: str, reason: str) -> bool:
        """Have a group get no new requests; an empty reason takes that back.

        Returns: Whether there is such a group.
        """
        record = self._records.get(name)
        if record is not None:
            record.past = replace(record.past, drain_reason=reason)
            self._ledger.drains.ask_group(name, reason)
        return record is not None

    def next_change_s(self, now_s: float) -> float | None:
        """When time alone changes something here."""
        times = [self._started_s + self._settle_s, self._started_s + FORGET_S]
        times += [
            record.empty_since_s + FORGET_S
            for record in self._records.values()
            if record.empty_since_s is not None
        ]
        times += [
            record.dead_since_s + self._hold_s
            for record in self._records.values()
            if record.dead_since_s is not None
        ]
        return min((when for when in times if when > now_s), default=None)

    def of(self, server_id: str) -> View | None:
        """The group of a server."""
        return self.views.get(self._group_of.get(server_id, ""))

    def _untold(self) -> Set[str]:
        """Groups of a decision that could not be saved: nobody heard of them."""
        return {
            name
            for name, record in self._records.items()
            if name not in self.views and not record.was_there
        }

    def _record(self, name: str) -> _Record:
        if name not in self._records:
            past = Past(drain_reason=self._ledger.drains.of_group(name))
            was_there = name in self._epochs.known_names()
            self._records[name] = _Record(past=past, was_there=was_there)
        return self._records[name]

    def _count_members(self, group: Group, record: _Record, placed: Set[str]) -> None:
        servers = group.servers()
        members = frozenset((entry.server_id, entry.boot_id) for entry in servers)
        if members == record.members:
            return
        record.has_moved = not members and all(name in placed for name, _ in record.members)
        new = [entry for entry in servers if (entry.server_id, entry.boot_id) not in record.members]
        for entry in new:
            if entry.registration.group == group.name:
                self._epochs.raise_to(group.name, entry.registration.epoch)
        epoch = self._epochs.of(group.name)
        # Whoever heard of this very epoch was a member then: an earlier router counted it.
        is_news = [
            entry
            for entry in new
            if (entry.registration.group, entry.registration.epoch) != (group.name, epoch)
        ]
        if is_news or record.members - members:
            self._epochs.advance(group.name)
        record.members = members

    def _view(
        self,
        group: Group,
        record: _Record,
        proof_of: Callable[[str], tuple[Proof, str]],
        now_s: float,
    ) -> View:
        stands = {}
        for entry in group.servers():
            if entry.registration.role is Role.MLP:
                stands[entry.server_id] = stand_of_mlp(entry, now_s)
            else:
                proof = proof_of(entry.server_id)
                stands[entry.server_id] = stand_of_attn(entry, group, proof, now_s)
        stand = stand_of_group(group, stands, record.past)
        if stand.state is GroupState.DRAINING:
            was_asked = record.past.drain_reason != ""
            stands = stands_where_all_drain(group, stands, stand.reason, was_asked=was_asked)
        is_ready = stand.state is GroupState.READY
        is_covered = not group.wires_itself and not group.gap
        record.past = replace(
            record.past,
            was_ready=record.past.was_ready or is_ready,
            was_covered=record.past.was_covered or is_covered,
            was_dead=(record.past.was_dead or stand.state is GroupState.DEAD) and not is_ready,
        )
        if stand.state is not GroupState.DEAD:
            record.dead_since_s = None
        elif record.dead_since_s is None:
            record.dead_since_s = now_s
        names = (name for entry in group.attn for name in entry.registration.models)
        record.models = tuple(dict.fromkeys(names)) or record.models
        return View(
            group=group,
            epoch=self._epochs.of(group.name),
            stand=stand,
            stands=stands,
            drain_reason=record.past.drain_reason,
            models=record.models,
            may_recover=self._may_recover(stand, record, now_s),
        )

    def _may_recover(self, stand: GroupStand, record: _Record, now_s: float) -> bool:
        if stand.state is GroupState.DRAINING:
            # Servers that drain are most often restarted; a whole group was meant to be gone.
            return not record.past.drain_reason
        if record.dead_since_s is not None:
            return now_s < record.dead_since_s + self._hold_s
        return stand.state in PASSING

    def _is_forgotten(self, view: View, record: _Record, now_s: float) -> bool:
        if view.stands:
            record.empty_since_s = None
            return False
        if record.empty_since_s is None:
            record.empty_since_s = now_s
        # One of an earlier router has members that may come back yet, and may be asked to drain.
        was_one = record.was_there or record.past.was_ready or record.past.was_covered
        return record.has_moved or not was_one or now_s >= record.empty_since_s + FORGET_S


def _speaks_for(views: Mapping[str, View]) -> dict[str, str]:
    """Which model each name means that an attention server of a group says."""
    return {
        name: view.group.shape.fingerprint
        for view in views.values()
        for entry in view.group.attn
        for name in entry.registration.models
    }
