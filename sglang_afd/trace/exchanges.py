"""Finds the exchanges in timelines: what attention servers dispatched, and who ran it when."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_afd.errors import ConfigError
from sglang_afd.trace.reading import Event, Timeline


class Key(NamedTuple):
    """Names an exchange on both sides; rows that go in pieces have several of one layer."""

    epoch: str
    step: int
    layer: int
    micro_batch: int
    piece: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """As the attention server saw it."""

    key: Key
    timeline: Timeline
    dispatch: Event
    combine: Event
    received_us: dict[int, float]  # when the reply of each rank had been read


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """As one MLP server saw it."""

    key: Key
    timeline: Timeline
    runs: list[Event]  # more than one where a prefill ran in pieces
    arrived_us: float
    replied_us: float


class Sample(NamedTuple):
    """Four times of one exchange, each in nanoseconds of the clock of its side."""

    sent_ns: int
    arrived_ns: int
    replied_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        """Time on the way, in both directions together."""
        return (self.received_ns - self.sent_ns) - (self.replied_ns - self.arrived_ns)

    @property
    def offset_ns(self) -> float:
        """What the MLP side's clock shows more, if both ways take equally long."""
        return (self.arrived_ns - self.sent_ns + self.replied_ns - self.received_ns) / 2


def dispatched(timeline: Timeline) -> list[Dispatched]:
    """Every exchange of an attention server that came to its end."""
    open_of: dict[int, Event] = {}  # by micro-batch
    pieces: Counter[Any] = Counter()
    found = []
    for event in timeline.events:
        if event.name == "dispatch":
            open_of[event.args["micro_batch"]] = event  # sent again, it is the last that counts
        elif event.name == "combine":
            args = event.args
            sent = open_of.pop(args["micro_batch"], None)
            if sent is None or sent.args["layer"] != args["layer"]:
                continue  # events were dropped
            address = (args["epoch"], args["step"], args["layer"], args["micro_batch"])
            found.append(
                Dispatched(
                    key=Key(*address, pieces[address]),
                    timeline=timeline,
                    dispatch=sent,
                    combine=event,
                    received_us={int(rank): at for rank, at in args["received_us"].items()},
                )
            )
            pieces[address] += 1
    return found


def served(timeline: Timeline) -> list[Served]:
    """Every exchange that an MLP server replied to."""
    pieces: Counter[Any] = Counter()
    runs: defaultdict[Any, list[Event]] = defaultdict(list)
    found = []
    for event in timeline.events:
        if event.name != "run":
            continue
        for member in event.args["members"]:
            address = (member["epoch"], member["step"], event.args["layer"], member["micro_batch"])
            runs[address].append(event)
            if member["replied_us"] is None or member["arrived_us"] is None:
                continue
            found.append(
                Served(
                    key=Key(*address, pieces[address]),
                    timeline=timeline,
                    runs=runs.pop(address),
                    arrived_us=member["arrived_us"],
                    replied_us=member["replied_us"],
                )
            )
            pieces[address] += 1
    return found


def pairs(timelines: list[Timeline]) -> Iterator[tuple[Dispatched, Served]]:
    """Every exchange of an attention server with each MLP server that served it."""
    served_by_key: defaultdict[Key, list[Served]] = defaultdict(list)
    for timeline in timelines:
        if timeline.header.role == "mlp":
            for service in served(timeline):
                served_by_key[service.key].append(service)
    for timeline in timelines:
        if timeline.header.role == "attn":
            for exchange in dispatched(timeline):
                for service in served_by_key.get(exchange.key, ()):
                    yield exchange, service


def sample(exchange: Dispatched, service: Served) -> Sample:
    """The times of one exchange.

    Raises:
        ConfigError: The attention server has no reply of that rank.
    """
    near, far = exchange.timeline.header, service.timeline.header
    received_us = exchange.received_us.get(far.rank)
    if received_us is None:
        raise ConfigError(
            f"{exchange.timeline.path} has no reply of rank {far.rank} to step "
            f"{exchange.key.step}, layer {exchange.key.layer}, but {service.timeline.path} is of "
            f"that rank and has the exchange; are both of the same run?"
        )
    return Sample(
        sent_ns=near.clock_ns + round(exchange.dispatch.ts * 1000),
        arrived_ns=far.clock_ns + round(service.arrived_us * 1000),
        replied_ns=far.clock_ns + round(service.replied_us * 1000),
        received_ns=near.clock_ns + round(received_us * 1000),
    )
