"""The router's metrics in the Prometheus text format (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sgl_router_afd.control.probe import Outcome
from sgl_router_afd.control.standing import GroupState, Standing
from sgl_router_afd.dataplane import counters
from sgl_router_afd.dataplane.counters import FIRST_BYTE_BUCKETS_S, SharedCounters
from sgl_router_afd.fleet import Fleet
from sgl_router_afd.tables import attention_servers, stands
from sglang_afd.config import Role

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "sgl_router_afd_"

Rows = Sequence[tuple[str, float]]  # labels and value of each

SIMPLE = (
    ("open_connections", "gauge", counters.CONNECTIONS, "connections of clients"),
    ("running_requests", "gauge", counters.RUNNING, "requests with a server or held for one"),
    ("queued_requests", "gauge", counters.QUEUED, "requests that wait for others to end"),
    ("held_requests", "gauge", counters.HELD, "requests that wait for a ready server"),
    ("requests_total", "counter", counters.REQUESTS, "requests that began to arrive"),
    ("holds_total", "counter", counters.HOLDS, "requests that had to wait for a ready server"),
    ("replayed_requests_total", "counter", counters.REPLAYED, "requests sent again elsewhere"),
    ("aborted_requests_total", "counter", counters.ABORTED, "requests whose client left"),
    ("broken_answers_total", "counter", counters.BROKEN, "answers that their server broke off"),
    ("request_body_bytes_total", "counter", counters.REQUEST_BYTES, "bytes of request bodies"),
    ("response_body_bytes_total", "counter", counters.RESPONSE_BYTES, "bytes of relayed answers"),
    ("response_chunks_total", "counter", counters.CHUNKS, "pieces of relayed answers"),
)


def render(shared: SharedCounters, fleet: Fleet) -> str:
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
    return "\n".join(lines) + "\n" + render_fleet(fleet)


def render_fleet(fleet: Fleet) -> str:
    """Those that need no relay process."""
    lines = [*_of_servers(fleet), *_of_groups(fleet), *_of_probes(fleet)]
    return "\n".join(lines) + "\n"


def _of_servers(fleet: Fleet) -> Iterator[str]:
    """Those of attention servers; `server` is the URL, as it always was."""
    plane, now_s = fleet.plane, fleet.now_s()
    standing = stands(plane)
    serving = {name for name, stand in standing.items() if stand.standing is Standing.SERVING}
    rows = [
        (_labels(server=entry.registration.url), entry, fleet.traffic(entry.server_id))
        for entry in attention_servers(plane)
    ]
    load = [(label, entry.report.load) for label, entry, _ in rows]
    families: tuple[tuple[str, str, str, Rows], ...] = (
        (
            *("server_in_flight_requests", "gauge", "requests at the server"),
            [(label, traffic.num_in_flight) for label, _, traffic in rows],
        ),
        (
            *("server_served_requests_total", "counter", "answers relayed whole"),
            [(label, traffic.num_served) for label, _, traffic in rows],
        ),
        (
            *("server_failed_requests_total", "counter", "connections refused or lost"),
            [(label, traffic.num_failed) for label, _, traffic in rows],
        ),
        (
            *("server_ready", "gauge", "1 while the server gets requests"),
            [(label, int(entry.server_id in serving)) for label, entry, _ in rows],
        ),
        (
            *("server_ttft_seconds", "gauge", "mean time to the first token, last ten seconds"),
            [(label, seen.ttft_s) for label, _, seen in rows if seen.ttft_s is not None],
        ),
        (
            *("server_running_requests", "gauge", "requests that run there, by its own report"),
            [(label, one.num_running) for label, one in load],
        ),
        (
            *("server_waiting_requests", "gauge", "requests that wait there, by its own report"),
            [(label, one.num_waiting) for label, one in load],
        ),
        (
            *("server_free_kv_tokens", "gauge", "tokens that its KV cache has room for"),
            [(label, one.free_kv_tokens) for label, one in load],
        ),
        (
            *("server_tokens_per_second", "gauge", "tokens that it generates, by its report"),
            [(label, one.tokens_per_s) for label, one in load],
        ),
        (
            *("server_expert_imbalance", "gauge", "most rows of an expert over the mean"),
            [
                (_labels(server=entry.registration.url), entry.report.load.expert_imbalance)
                for entry in plane.registry
                if entry.registration.role is Role.MLP
            ],
        ),
        (
            *("lease_age_seconds", "gauge", "time since a server was heard last, of both roles"),
            [
                (
                    _labels(server=entry.registration.url, role=entry.registration.role),
                    round(now_s - (entry.expires_s - plane.registry.terms.ttl_s), 3),
                )
                for entry in plane.registry
            ],
        ),
    )
    for name, kind, text, values in families:
        yield from _family(name, kind, text, values)


def _of_groups(fleet: Fleet) -> Iterator[str]:
    views = fleet.plane.groups.views.values()
    states: Rows = [
        (_labels(group=view.name, state=state), int(view.stand.state is state))
        for view in views
        for state in GroupState
    ]
    yield from _family("group_state", "gauge", "1 for the state that a group is in", states)
    epochs: Rows = [(_labels(group=view.name), view.epoch) for view in views]
    yield from _family("group_epoch", "gauge", "grows with every change of its members", epochs)
    members: Rows = [
        (_labels(group=view.name, role=role), number)
        for view in views
        for role, number in ((Role.ATTN, len(view.group.attn)), (Role.MLP, len(view.group.mlp)))
    ]
    yield from _family("group_servers", "gauge", "servers of a group by role", members)
    homeless: Rows = [("", len(fleet.plane.groups.homeless))]
    yield from _family("unplaced_servers", "gauge", "servers that belong to no group", homeless)
    unheard: Rows = [("", len(fleet.unheard()))]
    yield from _family("unheard_servers", "gauge", "URLs at which no server answers", unheard)


def _of_probes(fleet: Fleet) -> Iterator[str]:
    probes: Rows = [(_labels(outcome=outcome), fleet.num_probes[outcome]) for outcome in Outcome]
    yield from _family("pair_probes_total", "counter", "pair probes by what came of them", probes)
    yield from _family(
        "events_total", "counter", "what happened to servers and groups", [("", fleet.num_events)]
    )


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


def _family(name: str, kind: str, text: str, rows: Rows) -> list[str]:
    return [
        f"# HELP {PREFIX}{name} {text}",
        f"# TYPE {PREFIX}{name} {kind}",
        *(f"{PREFIX}{name}{suffix} {value}" for suffix, value in rows),
    ]


def _labels(**labels: str) -> str:
    # Names and URLs of servers are checked when they register, so that none has to be escaped.
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
