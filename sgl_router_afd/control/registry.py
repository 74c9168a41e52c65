"""Who is there: servers and their leases.

A lease that runs out makes a server late: it keeps its place, and gets no new requests. Only when
it stays away for a while longer is it gone. One that was late again and again has to renew in time
for a while, longer each time, before it counts as here: a flapping lease must not flap a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sgl_router_afd.control.departed import Departed
from sgl_router_afd.control.drains import Drains
from sgl_router_afd.control.persist import SavedWord
from sglang_afd.errors import Refused
from sglang_afd.protocol.registration import (
    DeclineCode,
    Leave,
    Registration,
    Renewal,
    Report,
)

MAX_SERVERS = 4096


@dataclass(frozen=True, kw_only=True)
class LeaseTerms:
    """How long things last."""

    ttl_s: float = 6.0  # a lease, from each renewal on
    renew_s: float = 2.0  # how often servers are asked to renew
    grace_s: float = 6.0  # how long a late server keeps its place
    flap_window_s: float = 60.0  # lapses are remembered for so long
    max_probation_s: float = 30.0  # of in-time renewals that a flapping server owes at most


@dataclass(kw_only=True, slots=True)
class Entry:
    """One registered server; changed only by `Registry`."""

    registration: Registration
    report: Report
    lease_id: str
    order: int  # of first registration
    expires_s: float
    steady_from_s: float  # it counts as here from then on
    sent_at_s: float  # stamp of the last message
    drain_reason: str = ""  # who asked it to drain; "" nobody
    num_in_flight_then: int = 0  # of this router there, when the report came

    @property
    def server_id(self) -> str:
        return self.registration.server_id

    @property
    def boot_id(self) -> str:
        return self.registration.boot_id

    @property
    def is_draining(self) -> bool:
        return self.why_draining != ""

    @property
    def why_draining(self) -> str:
        """Why it gets no new requests whatever its group does; "" if it does not drain."""
        return self.drain_reason or ("it was asked to end" if self.report.is_draining else "")

    def is_here(self, now_s: float) -> bool:
        """Does its lease run, and steadily?"""
        return self.steady_from_s <= now_s < self.expires_s

    def absence(self, now_s: float) -> str:
        """Why it does not count as here, for people; "" if it does."""
        if now_s >= self.expires_s:
            return f"its lease ran out {now_s - self.expires_s:.1f} s ago"
        if now_s < self.steady_from_s:
            return (
                "it was late again and again; it has to renew its lease in time for "
                f"{self.steady_from_s - now_s:.0f} s more"
            )
        return ""


class Registry:
    """Times are handed in; they are those of one monotonic clock.

    Args:
        router_boot_id: Begins every lease id, so that those of an earlier router are unknown.
        terms: How long things last.
        drains: What operators asked for, also of an earlier router.
        departed: Who was here, also at an earlier router.
    """

    def __init__(
        self, router_boot_id: str, terms: LeaseTerms, drains: Drains, departed: Departed
    ) -> None:
        self.terms = terms
        self._router_boot_id = router_boot_id
        self._drains = drains
        self._departed = departed
        self._entries: dict[str, Entry] = {}  # in the order of their first registration
        self._at: dict[str, Entry] = {}  # by URL
        self._of_boot: dict[str, Entry] = {}
        self._lapses: dict[tuple[str, str], list[float]] = {}  # by server and boot id
        self._num_leases = 0

    def __iter__(self) -> Iterator[Entry]:
        """All servers, those that registered first before the others."""
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, server_id: str) -> Entry | None:
        return self._entries.get(server_id)

    def of_boot(self, boot_id: str) -> Entry | None:
        """The server that is this process."""
        return self._of_boot.get(boot_id)

    def has(self, entry: Entry) -> bool:
        """Is this very process still registered?"""
        now = self._entries.get(entry.server_id)
        return now is not None and now.boot_id == entry.boot_id

    def now_of(self, entry: Entry) -> Entry:
        """What is known of this process now; the same again if it is not there any more."""
        now = self._entries.get(entry.server_id)
        return now if now is not None and now.boot_id == entry.boot_id else entry

    def register(self, registration: Registration, now_s: float) -> tuple[Entry, list[Entry]]:
        """Give a lease to a server, in place of an older process of its name or address.

        Returns: The server, and those that it took the place of.

        Raises:
            Refused: A newer process has the name or the address, the same one has reported later
                than that, also if it is gone since then, or there are too many servers.
        """
        before = self._entries.get(registration.server_id)
        rivals = self._rivals(registration)
        for held in rivals:
            _check_newer(registration, held)
        if before is None:
            self._departed.check(registration, now_s)
        else:
            _check_is_news(registration, before)
        if before is None and len(self._entries) >= MAX_SERVERS:
            raise Refused(
                DeclineCode.CAPACITY,
                f"this router keeps {MAX_SERVERS} servers and has them; use another one",
            )
        for held in rivals:
            if held is not before:
                self._drop(held, now_s)
                self._drains.ask(held.server_id, held.boot_id, "")
        if before is not None and before.boot_id == registration.boot_id:
            self._note_lapse(before, now_s)
        self._num_leases += 1
        entry = Entry(
            registration=registration,
            report=registration.report,
            lease_id=f"{self._router_boot_id}-{self._num_leases}",
            order=self._num_leases if before is None else before.order,
            expires_s=now_s + self.terms.ttl_s,
            steady_from_s=self._steady_from(registration, now_s, before),
            sent_at_s=registration.sent_at_s,
            drain_reason=self._drains.take_over(registration.server_id, registration.boot_id),
        )
        self._put(entry)
        return entry, rivals

    def renew(self, renewal: Renewal, now_s: float) -> Entry:
        """Extend a lease and take the report; an old message changes nothing.

        Raises:
            Refused: The lease is not known; the server has to register.
        """
        entry = self._held(renewal)
        if renewal.report.seq <= entry.report.seq:
            return entry
        if self._note_lapse(entry, now_s):
            entry.steady_from_s = self._steady_from(entry.registration, now_s, entry)
        entry.report = renewal.report
        entry.sent_at_s = max(entry.sent_at_s, renewal.sent_at_s)
        entry.expires_s = now_s + self.terms.ttl_s
        return entry

    def leave(self, message: Leave, now_s: float) -> Entry:
        """Forget a server that ends.

        Raises:
            Refused: The lease is not known.
        """
        entry = self._held(message)
        entry.sent_at_s = max(entry.sent_at_s, message.sent_at_s)
        self._drop(entry, now_s, said_goodbye=True)
        self._drains.ask(entry.server_id, entry.boot_id, "")
        return entry

    def remove(self, server_id: str, now_s: float) -> Entry | None:
        """Forget a server because an operator says so."""
        entry = self._entries.get(server_id)
        if entry is not None:
            self._drop(entry, now_s)
            self._drains.ask(server_id, entry.boot_id, "")
        return entry

    def drain(self, server_id: str, reason: str) -> Entry | None:
        """Have a server finish what it has; an empty reason takes that back."""
        entry = self._entries.get(server_id)
        if entry is not None:
            entry.drain_reason = reason
            self._drains.ask(server_id, entry.boot_id, reason)
        return entry

    def expire(self, now_s: float) -> list[Entry]:
        """Forget the servers that stayed away for too long, and return them."""
        terms = self.terms
        gone = [e for e in self._entries.values() if now_s >= e.expires_s + terms.grace_s]
        for entry in gone:
            self._add_lapse(entry, now_s)
            self._drop(entry, now_s)
        self._lapses = {
            key: recent for key in self._lapses if (recent := self._recent_lapses(key, now_s))
        }
        self._departed.expire(now_s)
        return gone

    def next_change_s(self, now_s: float) -> float | None:
        """When time alone changes something: a lease ends, a probation ends, a server is gone."""
        times = (
            when
            for entry in self._entries.values()
            for when in (
                entry.expires_s,
                entry.expires_s + self.terms.grace_s,
                entry.steady_from_s,
            )
        )
        return min((when for when in times if when > now_s), default=None)

    def _held(self, message: Renewal | Leave) -> Entry:
        entry = self._entries.get(message.server_id)
        if entry is None or entry.lease_id != message.lease_id:
            if entry is not None and entry.boot_id != message.boot_id:
                raise _replaced(entry)
            raise Refused(
                DeclineCode.UNKNOWN_LEASE,
                f"{message.server_id} holds no lease {message.lease_id}, for it ran out or the "
                "router was started anew; register again",
            )
        return entry

    def _rivals(self, registration: Registration) -> list[Entry]:
        named = self._entries.get(registration.server_id)
        there = self._at.get(registration.url)
        rivals = [named] if named is not None and named.boot_id != registration.boot_id else []
        if there is not None and there.server_id != registration.server_id:
            rivals.append(there)
        return rivals

    def _put(self, entry: Entry) -> None:
        before = self._entries.get(entry.server_id)
        if before is not None:
            self._forget(before)
        self._entries[entry.server_id] = entry
        self._at[entry.registration.url] = entry
        self._of_boot[entry.boot_id] = entry
        self._departed.note_arrival(entry.server_id, _word(entry))

    def _drop(self, entry: Entry, now_s: float, *, said_goodbye: bool = False) -> None:
        del self._entries[entry.server_id]
        self._forget(entry)
        self._departed.note(entry.server_id, _word(entry, said_goodbye=said_goodbye), now_s)

    def _forget(self, entry: Entry) -> None:
        self._at.pop(entry.registration.url, None)
        if self._of_boot.get(entry.boot_id) is entry:
            del self._of_boot[entry.boot_id]

    def _note_lapse(self, entry: Entry, now_s: float) -> bool:
        if now_s < entry.expires_s:
            return False
        self._add_lapse(entry, now_s)
        return True

    def _add_lapse(self, entry: Entry, now_s: float) -> None:
        key = (entry.server_id, entry.boot_id)
        self._lapses[key] = [*self._recent_lapses(key, now_s), now_s]

    def _recent_lapses(self, key: tuple[str, str], now_s: float) -> list[float]:
        since_s = now_s - self.terms.flap_window_s
        return [when for when in self._lapses.get(key, ()) if when > since_s]

    def _steady_from(self, registration: Registration, now_s: float, before: Entry | None) -> float:
        """When the server may count as here; at once after a first lapse."""
        key = (registration.server_id, registration.boot_id)
        num_lapses = len(self._recent_lapses(key, now_s))
        if num_lapses < 2:
            return now_s
        if before is not None and now_s < before.expires_s:
            return before.steady_from_s
        terms = self.terms
        return now_s + min(terms.renew_s * 2.0 ** min(num_lapses - 1, 16), terms.max_probation_s)


def _word(entry: Entry, *, said_goodbye: bool = False) -> SavedWord:
    return SavedWord(
        boot_id=entry.boot_id,
        started_at_s=entry.registration.started_at_s,
        seq=entry.report.seq,
        sent_at_s=entry.sent_at_s,
        said_goodbye=said_goodbye,
    )


def _check_is_news(registration: Registration, held: Entry) -> None:
    """An old message, which somebody may have played back, must not take the lease away."""
    is_same_process = registration.boot_id == held.boot_id
    if is_same_process and registration.report.seq <= held.report.seq:
        raise Refused(
            DeclineCode.UNKNOWN_LEASE,
            f"{held.server_id} has said more since it sent this; register again",
        )


def _check_newer(registration: Registration, held: Entry) -> None:
    if registration.started_at_s <= held.registration.started_at_s:
        raise _replaced(held)


def _replaced(held: Entry) -> Refused:
    return Refused(
        DeclineCode.REPLACED,
        f"a newer process has taken this place: {held.server_id} at {held.registration.url}, boot "
        f"id {held.boot_id}; stop one of the two, or give it a name and a port of its own",
    )
