"""The router's metrics in the Prometheus text format (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgl_router_afd.dataplane import counters
from sgl_router_afd.dataplane.counters import FIRST_BYTE_BUCKETS_S, SharedCounters
from sgl_router_afd.pool import Server
from sgl_router_afd.readiness import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "sgl_router_afd_"

SIMPLE = (
    ("open_connections", "gauge", counters.CONNECTIONS, "connections of clients"),
    ("running_requests", "gauge", counters.RUNNING, "requests with a server or held for one"),
    ("queued_requests", "gauge", counters.QUEUED, "requests that wait for others to end"),
    ("held_requests", "gauge", counters.HELD, "requests that wait for a ready server"),
    ("requests_total", "counter", counters.REQUESTS, "requests that began to arrive"),
    ("replayed_requests_total", "counter", counters.REPLAYED, "requests sent again elsewhere"),
    ("aborted_requests_total", "counter", counters.ABORTED, "requests whose client left"),
    ("broken_answers_total", "counter", counters.BROKEN, "answers that their server broke off"),
    ("request_body_bytes_total", "counter", counters.REQUEST_BYTES, "bytes of request bodies"),
    ("response_body_bytes_total", "counter", counters.RESPONSE_BYTES, "bytes of relayed answers"),
    ("response_chunks_total", "counter", counters.CHUNKS, "pieces of relayed answers"),
)


def render(shared: SharedCounters, servers: Sequence[Server]) -> str:
    """All metrics, summed over the relay processes."""
    lines: list[str] = []
    for name, kind, cell, text in SIMPLE:
        lines += _family(name, kind, text, [("", shared.total(cell))])
    by_status = shared.totals(counters.STATUS, 1000)
    lines += _family(
        "responses_total",
        "counter",
        "answers by HTTP status, the router's own among them",
        [(f'{{status="{code}"}}', number) for code, number in enumerate(by_status) if number],
    )
    lines += _first_byte(shared)
    for name, kind, row, text in (
        ("server_in_flight_requests", "gauge", counters.IN_FLIGHT, "requests at the server"),
        ("server_served_requests_total", "counter", counters.SERVED, "answers relayed whole"),
        ("server_failed_requests_total", "counter", counters.FAILED, "connections refused or lost"),
    ):
        rows = [(_label(server), shared.total(row + server.slot)) for server in servers]
        lines += _family(name, kind, text, rows)
    ready = [(_label(server), int(server.state is ServerState.READY)) for server in servers]
    lines += _family("server_ready", "gauge", "1 while the server gets requests", ready)
    return "\n".join(lines) + "\n"


def _first_byte(shared: SharedCounters) -> Iterable[str]:
    counts = shared.totals(counters.FIRST_BYTE_BUCKET, len(FIRST_BYTE_BUCKETS_S) + 1)
    name, total = "first_byte_seconds", 0
    rows: list[tuple[str, float]] = []
    for edge, count in zip((*FIRST_BYTE_BUCKETS_S, "+Inf"), counts, strict=True):
        total += count
        rows.append((f'_bucket{{le="{edge}"}}', total))
    rows.append(("_sum", shared.total(counters.FIRST_BYTE_US) / 1e6))
    rows.append(("_count", total))
    text = "from the end of a request's header to the first byte of its answer's body"
    return _family(name, "histogram", text, rows)


def _family(name: str, kind: str, text: str, rows: Sequence[tuple[str, float]]) -> list[str]:
    return [
        f"# HELP {PREFIX}{name} {text}",
        f"# TYPE {PREFIX}{name} {kind}",
        *(f"{PREFIX}{name}{suffix} {value}" for suffix, value in rows),
    ]


def _label(server: Server) -> str:
    return f'{{server="{server.url}"}}'
