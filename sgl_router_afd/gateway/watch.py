"""What smg says of its servers, as the router's counters and the control plane take it (pure).

smg tells nobody when a server refuses or breaks off, but it counts: so it is asked every second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from sgl_router_afd.dataplane.counters import (
    FAILED,
    IN_FLIGHT,
    SERVED,
    RelayCounters,
    SharedCounters,
)
from sgl_router_afd.dataplane.messages import BrokeOff, Table
from sgl_router_afd.gateway.manifest import Manifest

DRAINING = "draining"
OUTCOME = re.compile(
    r'^smg_worker_cb_outcomes_total\{worker="([^"]+)",outcome="(success|failure)"\} (\d+)$', re.M
)


class WorkerSeen(msgspec.Struct, frozen=True):
    """One server in smg's answer to `GET /workers`."""

    url: str
    status: str
    load: int  # requests of smg that are there now

    @property
    def may_get_requests(self) -> bool:
        return self.status != DRAINING


class _Answer(msgspec.Struct, frozen=True):
    workers: tuple[WorkerSeen, ...]


def read_workers(body: bytes) -> dict[str, WorkerSeen]:
    """The servers by URL.

    Raises:
        msgspec.DecodeError: It is something else.
    """
    answer = msgspec.json.decode(body, type=_Answer)
    return {worker.url: worker for worker in answer.workers}


def read_outcomes(metrics: str) -> dict[tuple[str, str], int]:
    """By URL, and `success` or `failure`: how many requests ended so since smg has the server."""
    return {(url, outcome): int(count) for url, outcome, count in OUTCOME.findall(metrics)}


class Watch:
    """Keeps the counters of one relay process, as if smg were one.

    Args:
        shared: The counters; nobody else writes them.
        on_trouble: Told of servers where requests failed.
    """

    def __init__(self, shared: SharedCounters, on_trouble: Callable[[BrokeOff], None]) -> None:
        self._shared = shared
        self._counters = RelayCounters(shared, 0)
        self._on_trouble = on_trouble
        self._slots: dict[str, int] = {}  # of all servers in the table, by URL
        self._listed: frozenset[str] = frozenset()  # URLs that smg may send requests to
        self._unsettled: set[str] = set()  # those that it may still take for listed
        self._seen: Mapping[tuple[str, str], int] = {}
        self._counted: set[int] = set()  # slots with a number in flight

    @property
    def is_settled(self) -> bool:
        """Whether smg is known to have let go of all servers that are not listed any more."""
        return not self._unsettled

    def publish(self, table: Table, manifest: Manifest) -> None:
        """These are the servers from now on, and those that smg is told of."""
        self._slots = {row.url: row.slot for row in table.rows}
        listed = frozenset(worker.url for worker in manifest.workers)
        self._unsettled = (self._unsettled | (self._listed - listed)) - listed
        self._listed = listed
        for url in self._unsettled & self._slots.keys():
            slot = self._slots[url]
            # Nobody is told that a server may stop while smg may still send something there.
            self._set_in_flight(slot, max(1, self._shared.total(IN_FLIGHT + slot)))

    def take(self, workers: Mapping[str, WorkerSeen], metrics: str) -> None:
        """What smg says now."""
        self._unsettled = {
            url for url in self._unsettled if url in workers and workers[url].may_get_requests
        }
        loads = {
            slot: max(int(url in self._unsettled), workers[url].load if url in workers else 0)
            for url, slot in self._slots.items()
        }
        for slot in self._counted - loads.keys():
            self._set_in_flight(slot, 0)
        for slot, load in loads.items():
            self._set_in_flight(slot, load)
        self._take_outcomes(read_outcomes(metrics))

    def forget(self) -> None:
        """smg ended: nothing is in flight, and another one counts from 0."""
        self._shared.forget_running(0)
        self._seen, self._counted, self._unsettled = {}, set(), set()

    def _take_outcomes(self, outcomes: Mapping[tuple[str, str], int]) -> None:
        seen, self._seen = self._seen, outcomes
        for (url, outcome), count in outcomes.items():
            before = seen.get((url, outcome), 0)
            num_new = count - before if count >= before else count  # smg forgot it and began anew
            slot = self._slots.get(url)
            if slot is None or not num_new:
                continue
            if outcome == "success":
                self._counters.add(SERVED + slot, num_new)
            else:
                self._counters.add(FAILED + slot, num_new)
                times = "once" if num_new == 1 else f"{num_new} times"
                self._on_trouble(BrokeOff(slot=slot, reason=f"smg failed there {times}"))

    def _set_in_flight(self, slot: int, number: int) -> None:
        cell = IN_FLIGHT + slot
        self._counters.add(cell, number - self._shared.total(cell))
        self._counted.add(slot)
