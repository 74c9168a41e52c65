"""The control plane at work: what changes it is published, and what time changes is not missed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from sgl_router_afd.control.plane import ControlPlane, Probe
from sgl_router_afd.control.probe import Outcome
from sgl_router_afd.dataplane.counters import HELD, IN_FLIGHT, MAX_SERVERS, QUEUED, SharedCounters
from sgl_router_afd.dataplane.messages import NO_TABLE, BrokeOff, Table, Unreachable
from sgl_router_afd.static_servers import StaticServers
from sgl_router_afd.status_words import clean
from sgl_router_afd.tables import attention_servers, build_table
from sgl_router_afd.traffic import Traffic, TrafficBook
from sglang_afd.config import Role

logger = logging.getLogger(__name__)

COALESCE_S = 0.02  # loads that are reported within it make one table
MAX_SHARE = 0.05  # of this process's time that tables of loads may take; servers report often


class Timer(Protocol):
    def cancel(self) -> None: ...


class Fleet:
    """One event loop's; without I/O of its own, which is handed in.

    Args:
        plane: Decides.
        book: Knows the requests of this router.
        counters: Of all relay processes.
        boot_id: Of this router process.
        clock: The plane's, monotonic seconds.
        call_later: Calls a function after so many seconds.
        stopwatch: Seconds, by which the cost of a table is measured.
    """

    def __init__(
        self,
        plane: ControlPlane,
        book: TrafficBook,
        counters: SharedCounters,
        *,
        boot_id: str,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], Timer],
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.plane = plane
        self.boot_id = boot_id
        self.started_s = clock()
        self.static = StaticServers(plane, clock, self.changed)
        self.num_probes: Counter[Outcome] = Counter()
        self.num_events = 0
        self._book = book
        self._counters = counters
        self._clock = clock
        self._call_later = call_later
        self._stopwatch = stopwatch
        self._publish: Callable[[Table], None] = lambda table: None
        self._start_probe: Callable[[Probe], None] | None = None
        self._table = NO_TABLE
        self._flush_timer: Timer | None = None
        self._is_flush_urgent = False
        self._plane_timer: Timer | None = None
        self._flushed_s = 0.0  # when the last table was made
        self._flush_cost_s = 0.0  # and what it took
        self._num_decisions = -1  # of the plane, when a table was asked for last
        self._is_closed = False
        self._trouble = ""
        self._when_decided: list[Callable[[], None]] = []
        self._without_slot: frozenset[str] = frozenset()

    def now_s(self) -> float:
        """The plane's clock."""
        return self._clock()

    def publish_to(self, publish: Callable[[Table], None]) -> None:
        """Call `publish` with the table of now, and with every later one."""
        self._publish = publish
        self._table = self._build()
        publish(self._table)

    def probe_with(self, start_probe: Callable[[Probe], None]) -> None:
        """Call `start_probe` with every probe that is due; its end goes to `on_probe_end`."""
        self._start_probe = start_probe
        self.changed()

    def changed(self) -> None:
        """Decide soon what the plane was told, tell everybody, look when it changes by itself.

        Servers that come all at once, as they do after a restart of the router, are decided on
        together: a decision takes as long as there are servers.
        """
        has_news = self.plane.is_undecided or self.plane.num_decisions != self._num_decisions
        is_awaited = self._flush_timer is not None and (self._is_flush_urgent or not has_news)
        if self._is_closed or is_awaited:
            return
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        # Numbers alone can wait a little for others; where requests go cannot.
        rest_s = self._flush_cost_s if has_news else max(COALESCE_S, self._flush_cost_s / MAX_SHARE)
        wait_s = max(0.0, self._flushed_s + rest_s - self._clock())
        self._is_flush_urgent = has_news
        self._flush_timer = self._call_later(wait_s, self._flush)

    def when_decided(self, call: Callable[[], None]) -> None:
        """Call this once all is decided that the plane was told until now."""
        self.changed()
        if self.plane.is_undecided and not self._is_closed:
            self._when_decided.append(call)
        else:
            call()

    def close(self) -> None:
        """Publish and decide nothing more."""
        self._is_closed = True
        for timer in (self._flush_timer, self._plane_timer):
            if timer is not None:
                timer.cancel()
        self._tell_decided()

    def on_trouble(self, message: Unreachable | BrokeOff) -> None:
        """A relay process met trouble with the server of a slot."""
        server_id = self._book.slots.owner(message.slot)
        if server_id is not None:
            is_certain = isinstance(message, Unreachable)
            self.plane.on_trouble(server_id, message.reason, self._clock(), is_certain=is_certain)
            self.changed()

    def on_probe_end(self, probe: Probe, outcome: Outcome, detail: str) -> None:
        """A probe that was started ended."""
        self.num_probes[outcome] += 1
        if outcome is not Outcome.PASSED:
            logger.info("the pair probe of %s %s: %s", probe.server_id, outcome, clean(detail))
        self.plane.end_probe(probe, outcome, detail, self._clock())
        self.changed()

    def sample(self) -> None:
        """To be called about every `traffic.SAMPLE_S`."""
        self._book.sample()

    def traffic(self, server_id: str) -> Traffic:
        """The requests of this router at a server."""
        return self._book.of(server_id)

    def num_in_flight_then(self, server_id: str) -> int:
        """What this router had there when the server's last report came."""
        entry = self.plane.registry.get(server_id)
        return 0 if entry is None else entry.num_in_flight_then

    def num_requests_in_flight(self) -> int:
        """Requests at servers, all together."""
        return sum(self._counters.totals(IN_FLIGHT, MAX_SERVERS))

    def num_requests_waiting(self) -> int:
        """Requests that wait to be let in, or for a server."""
        return self._counters.total(QUEUED) + self._counters.total(HELD)

    def is_static(self, server_id: str) -> bool:
        """Is the server one that this router asks, rather than one that registered itself?"""
        return self.static.url_of(server_id) != ""

    def statics(self) -> tuple[tuple[str, Role], ...]:
        """All URLs that the router asks, with the role that it expects there."""
        return tuple((static.url, static.role) for static in self.static.all())

    def unheard(self) -> tuple[tuple[str, str], ...]:
        """URL and reason of those of them that are not registered now."""
        return self.static.unheard()

    def add_static(self, url: str, role: Role) -> None:
        """Ask this URL from now on, too."""
        self.static.add(role, url)

    def remove_static(self, url: str) -> bool:
        """Ask it no more, and forget its server; returns whether it was asked."""
        held = [
            entry for entry in self.plane.registry if self.static.url_of(entry.server_id) == url
        ]
        was_asked = self.static.remove(url)
        for entry in held:
            self.plane.remove(entry.server_id, self._clock())
        self.changed()
        return was_asked

    def _flush(self) -> None:
        self._flush_timer = None
        began_s = self._stopwatch()
        if self.plane.is_undecided:
            self.plane.update(self._clock())
        self._num_decisions = self.plane.num_decisions
        self._tell_decided()
        self._start_probes()
        self._log_events()
        table = self._build()
        if table != self._table:
            self._table = table
            self._publish(table)
        self._arm()
        self._flushed_s, self._flush_cost_s = self._clock(), self._stopwatch() - began_s

    def _tell_decided(self) -> None:
        calls, self._when_decided = self._when_decided, []
        for call in calls:
            call()

    def _start_probes(self) -> None:
        if self._start_probe is not None:
            for probe in self.plane.start_probes(self._clock()):
                self._start_probe(probe)

    def _build(self) -> Table:
        owners = [
            (entry.server_id, entry.registration.url) for entry in attention_servers(self.plane)
        ]
        left_out = frozenset(
            server_id for server_id, _ in self._book.slots.take(owners, self._clock())
        )
        if left_out - self._without_slot:
            names = ", ".join(sorted(left_out - self._without_slot))
            logger.error(
                "no slot of %d is free for %s: no request goes there; use a second router for more "
                "attention servers",
                *(MAX_SERVERS, names),
            )
        self._without_slot = left_out
        return build_table(self.plane, self._book.slots.of, self.unheard())

    def _arm(self) -> None:
        if self._plane_timer is not None:
            self._plane_timer.cancel()
        now_s = self._clock()
        next_s = self.plane.next_change_s(now_s)
        self._plane_timer = (
            None
            if next_s is None
            else self._call_later(max(next_s - now_s, COALESCE_S), self._on_time)
        )

    def _on_time(self) -> None:
        self._plane_timer = None
        self.plane.update(self._clock())
        self.changed()

    def _log_events(self) -> None:
        news = self.plane.events.take_news()
        for event in news:
            logger.info("%s", clean(event.text))  # reasons are servers' and operators' words
        if self.plane.trouble and self.plane.trouble != self._trouble:
            logger.error("groups stay as they are: %s", self.plane.trouble)
        self._trouble = self.plane.trouble
        self.num_events += len(news)
