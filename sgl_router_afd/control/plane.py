"""The control plane whole: messages and times in, leases, routes and probes out (no I/O)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl_router_afd.control.departed import Departed
from sgl_router_afd.control.events import Events
from sgl_router_afd.control.groups import Groups
from sgl_router_afd.control.ledger import Ledger
from sgl_router_afd.control.probe import Outcome, ProbeSchedule, ProbeTerms
from sgl_router_afd.control.ratio import Ratio
from sgl_router_afd.control.registry import Entry, LeaseTerms, Registry
from sgl_router_afd.control.routing import Route, route
from sgl_router_afd.control.told import tell
from sglang_afd.config import Role
from sglang_afd.errors import ConfigError
from sglang_afd.protocol.registration import (
    REGISTRATION_VERSION,
    Condition,
    Lease,
    Leave,
    Registration,
    Renewal,
)

RETRY_S = 1.0  # after an epoch could not be saved


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One token to ask of one attention server."""

    server_id: str
    url: str
    attachment: tuple[str, ...]  # the processes that it proves


class ControlPlane:
    """One thread's; every method takes the time, of one monotonic clock.

    Args:
        router_boot_id: Of this process.
        ledger: What survives it.
        started_s: When it began.
        ratio: Attention to MLP servers, or None.
        lease_terms: Of leases.
        probe_terms: Of pair probes.
        hold_s: How long requests may wait for a group whose servers all left a moment ago.
        num_in_flight: Requests of this router at an attention server, by server id.
    """

    def __init__(
        self,
        router_boot_id: str,
        ledger: Ledger,
        *,
        started_s: float,
        ratio: Ratio | None = None,
        lease_terms: LeaseTerms | None = None,
        probe_terms: ProbeTerms | None = None,
        hold_s: float = 10.0,
        num_in_flight: Callable[[str], int] = lambda server_id: 0,
    ) -> None:
        departed = Departed(ledger.words, started_s)
        terms = lease_terms or LeaseTerms()
        self.registry = Registry(router_boot_id, terms, ledger.drains, departed)
        self.probes = ProbeSchedule(probe_terms)
        self.groups = Groups(
            ledger, ratio=ratio, started_s=started_s, settle_s=terms.ttl_s, hold_s=hold_s
        )
        self.events = Events()
        self.is_undecided = False  # has anything happened since the last `update`?
        self.num_decisions = 0  # grows whenever something but loads may have changed
        self.trouble = ""  # why groups keep their members, for people
        self._ledger = ledger
        self._num_in_flight = num_in_flight
        self._retry_s: float | None = None
        self._decided_s = started_s  # what time changed until then is decided

    def register(self, registration: Registration, now_s: float) -> Entry:
        """Take a server in.

        Raises:
            Refused: See `Registry.register`.
        """
        held = self.registry.get(registration.server_id)
        entry, replaced = self.registry.register(registration, now_s)
        self._count(entry)
        if held is None or held.boot_id != entry.boot_id:
            self.events.note(f"{entry.server_id} registered, {_what(entry)}", now_s)
        for gone in replaced:
            if gone.server_id != entry.server_id:
                what = f"is replaced by {entry.server_id}, which has its address"
                self.events.note(f"{gone.server_id} {what}", now_s)
                self.probes.on_detached(gone.server_id)
        self.is_undecided = True
        return entry

    def renew(self, renewal: Renewal, now_s: float) -> Entry:
        """Extend a server's lease.

        Raises:
            Refused: See `Registry.renew`.
        """
        known = self.registry.get(renewal.server_id)
        lost_before = _lost(known)
        before = _what_decides(known, now_s)
        entry = self.registry.renew(renewal, now_s)
        if entry.report is renewal.report:
            self._count(entry)
        if _what_decides(entry, now_s) != before:
            self.is_undecided = True
        for boot_id, reason in _lost(entry).items():
            if boot_id not in lost_before:
                self._on_peer_loss(entry, boot_id, reason, now_s)
        return entry

    def leave(self, message: Leave, now_s: float) -> None:
        """Forget a server that ends.

        Raises:
            Refused: See `Registry.leave`.
        """
        entry = self.registry.leave(message, now_s)
        self.events.note(f"{entry.server_id} left", now_s)
        self.is_undecided = True

    def remove(self, server_id: str, now_s: float) -> bool:
        """Forget a server because an operator says so; returns whether it was there."""
        entry = self.registry.remove(server_id, now_s)
        if entry is not None:
            self.events.note(f"{server_id} was removed", now_s)
            self.update(now_s)
        return entry is not None

    def drain(self, server_id: str, reason: str, now_s: float) -> bool:
        """Have a server finish; an empty reason takes that back. Returns whether it is there."""
        entry = self.registry.drain(server_id, reason)
        if entry is not None:
            self._on_drain(server_id, reason, now_s)
        return entry is not None

    def drain_group(self, name: str, reason: str, now_s: float) -> bool:
        """The same for all servers of a group."""
        is_there = self.groups.drain(name, reason)
        if is_there:
            self._on_drain(name, reason, now_s)
        return is_there

    def update(self, now_s: float) -> None:
        """Let time pass and decide anew.

        To be called soon after something happened, once for all that happened meanwhile since each
        time takes as long as there are servers; at `next_change_s`; and by this class itself where
        an operator asked for something.

        Where an epoch cannot be saved all groups keep their members, and `trouble` says why.
        """
        self._decided_s, self.is_undecided = now_s, False
        try:
            self._decide(now_s)
            self._ledger.save()
        except ConfigError as error:
            self.trouble, self._retry_s = str(error), now_s + RETRY_S
        else:
            self.trouble, self._retry_s = "", None

    def _decide(self, now_s: float) -> None:
        self.num_decisions += 1
        for entry in self.registry.expire(now_s):
            self.events.note(f"{entry.server_id} is gone: {entry.absence(now_s)}", now_s)
        entries = list(self.registry)
        self._ledger.forget_who_is_away({entry.server_id for entry in entries}, now_s)
        # Proofs depend on who belongs together, and what groups are on proofs.
        failure = self._update_groups(entries, now_s)
        if self._follow_attachments(entries, now_s):
            failure = self._update_groups(entries, now_s)
        self.events.note_changes(self.groups.views.values(), now_s)
        if failure is not None:
            raise failure

    def _update_groups(self, entries: list[Entry], now_s: float) -> ConfigError | None:
        """Why groups keep the members that they had, if they have to."""
        try:
            self.groups.update(entries, self.probes.proof, now_s)
        except ConfigError as error:
            self.groups.keep(entries, self.registry.now_of, self.probes.proof, now_s)
            return error
        return None

    def next_change_s(self, now_s: float) -> float | None:
        """When `update` or a probe is due though nothing happens; it may be overdue already.

        A timer may fire a moment early, and that moment may be over when this is asked.
        """
        since_s = min(now_s, self._decided_s)
        times = (
            self.registry.next_change_s(since_s),
            self.groups.next_change_s(since_s),
            self.probes.next_due_s(),
            self._retry_s,
        )
        return min((when for when in times if when is not None), default=None)

    def start_probes(self, now_s: float) -> list[Probe]:
        """The probes to make now; the end of each goes to `end_probe`."""
        probes = []
        for server_id in self.probes.due(now_s):
            entry = self.registry.get(server_id)
            if entry is None:  # it left, and groups stay as they are; else this stays due
                self.probes.on_detached(server_id)
                continue
            attachment = self.probes.on_started(server_id, now_s)
            url = entry.registration.url
            probes.append(Probe(server_id=server_id, url=url, attachment=attachment))
        return probes

    def end_probe(self, probe: Probe, outcome: Outcome, detail: str, now_s: float) -> None:
        """Take what came of a probe; `detail` is the answer or the error, for people."""
        self.probes.on_outcome(probe.server_id, outcome, detail, now_s, probe.attachment)
        self.is_undecided = True

    def on_trouble(self, server_id: str, reason: str, now_s: float, *, is_certain: bool) -> None:
        """A relay met trouble with a server: see `ProbeSchedule.on_trouble`."""
        self.probes.on_trouble(server_id, reason, now_s, is_certain=is_certain)
        self.is_undecided = True

    def route(self, model: str | None) -> Route:
        """The servers that may get a request."""
        groups = self.groups
        return route(
            model,
            groups.views.values(),
            is_settled=groups.is_settled,
            is_there=self.registry.has,
        )

    def lease(self, entry: Entry) -> Lease:
        """What a server is to be told, as decided last."""
        told = tell(entry, self.groups, self._num_in_flight)
        terms = self.registry.terms
        return Lease(
            version=REGISTRATION_VERSION,
            lease_id=entry.lease_id,
            ttl_s=terms.ttl_s,
            renew_s=terms.renew_s,
            group=told.group,
            epoch=told.epoch,
            mlp_urls=told.mlp_urls,
            reason=told.reason[:2000],
            is_draining=told.is_draining,
            may_stop=told.may_stop,
        )

    def _count(self, entry: Entry) -> None:
        """Its report came just now, and knows of these requests."""
        if entry.registration.role is Role.ATTN:
            entry.num_in_flight_then = self._num_in_flight(entry.server_id)

    def _follow_attachments(self, entries: list[Entry], now_s: float) -> bool:
        """Tell the probes who is attached to whom; returns whether that is news."""
        attached = {}
        for entry in entries:
            view = self.groups.of(entry.server_id)
            is_attn = entry.registration.role is Role.ATTN
            if view is None or not is_attn or entry.report.condition is not Condition.READY:
                continue
            if view.group.is_heard_by(entry):
                attached[entry.server_id] = (entry.boot_id, *sorted(entry.report.attached))
        gone = self.probes.known() - attached.keys()
        for server_id in gone:
            self.probes.on_detached(server_id)
        news = [
            self.probes.on_attached(server_id, attachment, now_s)
            for server_id, attachment in attached.items()
        ]
        return bool(gone) or any(news)

    def _on_peer_loss(self, entry: Entry, boot_id: str, reason: str, now_s: float) -> None:
        """One side of a pair misses the other: the attention server of it has to prove itself."""
        peer = self.registry.of_boot(boot_id)
        name = peer.server_id if peer is not None else boot_id
        self.events.note(f"{entry.server_id} reports that it lost {name}: {reason}", now_s)
        for one in (entry, peer):
            if one is not None and one.registration.role is Role.ATTN:
                why = f"{entry.server_id} lost {name}: {reason}"
                self.probes.on_trouble(one.server_id, why, now_s, is_certain=False)

    def _on_drain(self, name: str, reason: str, now_s: float) -> None:
        what = f"drains: {reason}" if reason else "drains no more"
        self.events.note(f"{name} {what}", now_s)
        self.update(now_s)


def _lost(entry: Entry | None) -> dict[str, str]:
    return {} if entry is None else {loss.boot_id: loss.reason for loss in entry.report.lost}


def _what_decides(entry: Entry | None, now_s: float) -> object:
    """All of a server's report that groups depend on; most renewals change the load alone."""
    if entry is None:
        return None
    report = entry.report
    said = (report.condition, report.reason, report.attached, report.lost, report.is_draining)
    return (entry.is_here(now_s), *said)


def _what(entry: Entry) -> str:
    shard = entry.registration.shard
    if entry.registration.role is Role.ATTN:
        return f"attention server at {entry.registration.url}"
    if shard is None:
        return f"spare MLP server at {entry.registration.url}"
    return f"MLP rank {shard.ep_rank} of {shard.ep_size} at {entry.registration.url}"
