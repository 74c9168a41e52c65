"""Makes one Chrome trace of several servers' timelines, with arrows along each exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.trace.clocks import Offset, offsets
from sglang_afd.trace.exchanges import Dispatched, Served, pairs
from sglang_afd.trace.reading import Event, Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """The trace, and what there is to say about it."""

    trace: dict[str, Any]  # Chrome's JSON object format
    num_exchanges: int  # pairs of an attention and an MLP server
    offsets: dict[str, Offset]  # by boot id


def merge(timelines: Sequence[Timeline]) -> Merged:
    """One process per server, attention servers first; times since the first event.

    Raises:
        ConfigError: The files do not belong together.
    """
    ordered = sorted(timelines, key=lambda t: (t.header.role, t.header.rank, t.header.server_id))
    _check_servers(ordered)
    exchanges = list(pairs(ordered))
    if not exchanges and {timeline.header.role for timeline in ordered} == {"attn", "mlp"}:
        raise ConfigError(
            f"{ordered[0].path} and the other files share no exchange; give files of one run, in "
            f"which a request was served"
        )
    known = offsets(ordered, exchanges)
    shifts_us = {id(timeline): _shift_us(timeline, known) for timeline in ordered}
    begin_us = min(
        (
            event.ts + shifts_us[id(timeline)]
            for timeline in ordered
            for event in timeline.events
            if event.ph != "M"
        ),
        default=0.0,
    )
    shifts_us = {key: shift_us - begin_us for key, shift_us in shifts_us.items()}
    events: list[dict[str, Any]] = []
    pids = {id(timeline): pid for pid, timeline in enumerate(ordered, 1)}
    for timeline in ordered:
        events += _of_server(timeline, pids[id(timeline)], shifts_us[id(timeline)])
    for number, (exchange, service) in enumerate(exchanges, 1):
        events += _arrow(number, exchange, service, pids, shifts_us)
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {
            "servers": [timeline.header.server_id for timeline in ordered],
            "clock_offsets_ns": {host: offset.offset_ns for host, offset in known.items()},
        },
        "traceEvents": events,
    }
    return Merged(trace=trace, num_exchanges=len(exchanges), offsets=known)


def _check_servers(timelines: Sequence[Timeline]) -> None:
    counts = Counter(timeline.header.server_id for timeline in timelines)
    for timeline in timelines:
        header = timeline.header
        if counts[header.server_id] > 1:
            raise ConfigError(
                f"{timeline.path} is of {header.server_id}, as is another of the files; give each "
                f"server's file once"
            )


def _shift_us(timeline: Timeline, known: dict[str, Offset]) -> float:
    header = timeline.header
    return (header.clock_ns - known[header.boot_id].offset_ns) / 1000


def _of_server(timeline: Timeline, pid: int, shift_us: float) -> list[dict[str, Any]]:
    header = timeline.header
    rank = f", rank {header.rank}" if header.role == "mlp" else ""
    name = f"{header.server_id} ({header.role}{rank}, {header.hostname})"
    return [
        _metadata("process_name", pid, {"name": name}),
        _metadata("process_sort_index", pid, {"sort_index": pid}),
        *(_shifted(event, pid, shift_us) for event in timeline.events),
    ]


def _metadata(name: str, pid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": 0, "ts": 0, "args": args}


def _shifted(event: Event, pid: int, shift_us: float) -> dict[str, Any]:
    shown: dict[str, Any] = {"ph": event.ph, "name": event.name, "pid": pid, "tid": event.tid}
    shown["ts"] = 0 if event.ph == "M" else round(event.ts + shift_us, 3)
    if event.ph == "X":
        shown["dur"] = round(event.dur, 3)
    if event.ph == "i":
        shown["s"] = event.s
    return shown | {"args": event.args}


def _arrow(
    number: int,
    exchange: Dispatched,
    service: Served,
    pids: dict[int, int],
    shifts_us: dict[int, float],
) -> list[dict[str, Any]]:
    near, far = id(exchange.timeline), id(service.timeline)
    stations = [
        ("s", near, exchange.dispatch),
        *(("t", far, run) for run in service.runs),
        ("f", near, exchange.combine),
    ]
    arrow = []
    for ph, key, event in stations:
        point: dict[str, Any] = {"ph": ph, "cat": "exchange", "name": "exchange", "id": number}
        at_us = round(event.ts + shifts_us[key], 3)
        point |= {"pid": pids[key], "tid": event.tid, "ts": at_us}
        arrow.append(point | ({"bp": "e"} if ph == "f" else {}))
    return arrow
