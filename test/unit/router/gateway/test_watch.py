from __future__ import annotations

import json

import msgspec
import pytest

from sgl_router_afd.dataplane.counters import FAILED, IN_FLIGHT, SERVED, SharedCounters
from sgl_router_afd.dataplane.messages import NOBODY, BrokeOff, ModelRow, ServerRow, Table
from sgl_router_afd.gateway.manifest import manifest_of
from sgl_router_afd.gateway.watch import Watch, WorkerSeen, read_outcomes, read_workers

A, B = "http://a:1", "http://b:2"


class Seen:
    """A watch, and what it did."""

    def __init__(self) -> None:
        self.shared = SharedCounters.create(1)
        self.troubles: list[BrokeOff] = []
        self.watch = Watch(self.shared, self.troubles.append)
        self.publish(A, B)

    def publish(self, *serving: str, known: tuple[str, ...] = (A, B)) -> None:
        rows = tuple(
            ServerRow(slot=slot, server_id=url, url=url, state="", reason="")
            for slot, url in enumerate((A, B))
            if url in known
        )
        slots = tuple(row.slot for row in rows if row.url in serving)
        models = {"m": ModelRow(slots=slots)}
        table = Table(rows=rows, models=models, unnamed=NOBODY, unknown=NOBODY)
        self.watch.publish(table, manifest_of(table))

    def take(self, metrics: str = "", **loads: tuple[str, int]) -> None:
        urls = {"a": A, "b": B}
        workers = {
            urls[name]: WorkerSeen(urls[name], status, load)
            for name, (status, load) in loads.items()
        }
        self.watch.take(workers, metrics)

    def cells(self, first: int) -> tuple[int, int]:
        return self.shared.total(first), self.shared.total(first + 1)


@pytest.fixture
def seen() -> Seen:
    return Seen()


def outcomes(url: str, success: int, failure: int) -> str:
    name = "smg_worker_cb_outcomes_total"
    return (
        f'# TYPE {name} counter\n{name}{{worker="{url}",outcome="success"}} {success}\n'
        f'{name}{{worker="{url}",outcome="failure"}} {failure}\n'
    )


def test_requests_at_servers_are_those_that_smg_has_there(seen: Seen) -> None:
    seen.take(a=("ready", 3), b=("ready", 0))

    assert seen.cells(IN_FLIGHT) == (3, 0)


def test_a_server_counts_as_busy_until_smg_has_let_go_of_it(seen: Seen) -> None:
    seen.take(a=("ready", 0), b=("ready", 0))
    counts = []

    seen.publish(B)
    counts.append((seen.cells(IN_FLIGHT)[0], seen.watch.is_settled))
    seen.take(a=("ready", 0), b=("ready", 0))
    counts.append((seen.cells(IN_FLIGHT)[0], seen.watch.is_settled))
    seen.take(a=("draining", 0), b=("ready", 0))
    counts.append((seen.cells(IN_FLIGHT)[0], seen.watch.is_settled))

    assert counts == [(1, False), (1, False), (0, True)]


def test_what_a_server_finishes_counts_while_smg_lets_go_of_it(seen: Seen) -> None:
    seen.publish(B)

    seen.take(a=("draining", 2))

    assert seen.cells(IN_FLIGHT) == (2, 0)


def test_requests_at_a_server_that_smg_has_not_let_go_of_are_not_counted_twice(seen: Seen) -> None:
    seen.publish(B)

    seen.take(a=("ready", 2))

    assert seen.cells(IN_FLIGHT) == (2, 0)


def test_a_server_that_serves_again_is_not_waited_for(seen: Seen) -> None:
    seen.publish(B)

    seen.publish(A, B)

    assert seen.watch.is_settled


def test_a_server_that_is_gone_leaves_no_request_behind(seen: Seen) -> None:
    seen.take(a=("ready", 3))

    seen.publish(B, known=(B,))
    seen.take(b=("ready", 1))

    assert seen.cells(IN_FLIGHT) == (0, 1)


def test_answers_are_counted_over_what_smg_forgets(seen: Seen) -> None:
    for metrics in (*(outcomes(A, number, 0) for number in (5, 7, 2)), "", outcomes(A, 1, 0)):
        seen.take(metrics)

    assert seen.cells(SERVED) == (10, 0)


def test_failures_are_told_once_with_their_number(seen: Seen) -> None:
    for failures in (0, 1, 1, 4):
        seen.take(outcomes(B, 0, failures))

    assert [(one.slot, one.reason) for one in seen.troubles] == [
        (1, "smg failed there once"),
        (1, "smg failed there 3 times"),
    ]
    assert seen.cells(FAILED) == (0, 4)


def test_nothing_is_in_flight_and_counts_go_on_when_smg_starts_anew(seen: Seen) -> None:
    seen.take(outcomes(A, 5, 0), a=("ready", 3))

    seen.watch.forget()
    in_flight = seen.cells(IN_FLIGHT)
    seen.take(outcomes(A, 5, 0))

    assert in_flight == (0, 0)
    assert seen.cells(SERVED) == (10, 0)


def test_smgs_answers_are_read_by_url() -> None:
    body = {"workers": [{"url": A, "status": "draining", "load": 2, "id": "x"}], "total": 1}

    workers = read_workers(json.dumps(body).encode())

    assert workers == {A: WorkerSeen(A, "draining", 2)}
    assert read_outcomes(outcomes(A, 3, 1)) == {(A, "success"): 3, (A, "failure"): 1}


def test_an_answer_of_something_else_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        read_workers(b'{"error": {}}')
