"""Puts the clocks of several hosts on one, from the exchanges between them.

Servers with the same boot id share a clock. Between two hosts each exchange says what the MLP
side's clock shows more, wrong by at most half of the time on the way; the quickest say it best.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_afd.errors import ConfigError
from sglang_afd.trace.exchanges import Dispatched, Sample, Served, sample
from sglang_afd.trace.reading import Timeline

BEST_SHARE = 0.1  # of the exchanges of two hosts, the quickest
FEWEST_BEST = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Offset:
    """What a host's clock shows more than that of the first file's host."""

    offset_ns: int
    round_trip_ns: int  # twice the largest error; 0 on the same host
    num_exchanges: int  # that it was estimated from


def offsets(
    timelines: list[Timeline], pairs: Iterable[tuple[Dispatched, Served]]
) -> dict[str, Offset]:
    """The offset of every host, by boot id.

    Raises:
        ConfigError: A host shares no exchange with the others, or times contradict one another.
    """
    samples = _samples_between_hosts(pairs)
    first = timelines[0].header.boot_id
    known = {first: Offset(offset_ns=0, round_trip_ns=0, num_exchanges=0)}
    hosts = {timeline.header.boot_id for timeline in timelines}
    while missing := hosts - known.keys():
        links = [
            (len(of_both), near, far)
            for (near, far), of_both in samples.items()
            if (near in known) != (far in known)
        ]
        if not links:
            lost = next(t for t in timelines if t.header.boot_id in missing)
            raise ConfigError(
                f"{lost.path} was recorded on another host ({lost.header.hostname}) and shares no "
                f"exchange with the other files, so its clock cannot be placed; give the files of "
                f"one run, and those of the servers that it talked to"
            )
        _, near, far = max(links)
        between = estimate(samples[near, far])
        sign, new, old = (1, far, near) if near in known else (-1, near, far)
        known[new] = Offset(
            offset_ns=known[old].offset_ns + sign * between.offset_ns,
            round_trip_ns=known[old].round_trip_ns + between.round_trip_ns,
            num_exchanges=between.num_exchanges,
        )
    return known


def estimate(samples: list[Sample]) -> Offset:
    """What the MLP side's clock shows more: the median over the quickest exchanges."""
    by_round_trip = sorted(samples, key=lambda each: each.round_trip_ns)
    best = by_round_trip[: max(FEWEST_BEST, int(len(samples) * BEST_SHARE))]
    return Offset(
        offset_ns=round(statistics.median(each.offset_ns for each in best)),
        round_trip_ns=best[-1].round_trip_ns,
        num_exchanges=len(best),
    )


def _samples_between_hosts(
    pairs: Iterable[tuple[Dispatched, Served]],
) -> dict[tuple[str, str], list[Sample]]:
    samples: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
    for exchange, service in pairs:
        times = sample(exchange, service)
        near, far = exchange.timeline.header.boot_id, service.timeline.header.boot_id
        if near == far:
            _check_order(times, exchange, service)
        elif times.round_trip_ns < 0:
            raise ConfigError(_contradiction(exchange, service, "took less than no time"))
        else:
            samples[near, far].append(times)
    return samples


def _check_order(times: Sample, exchange: Dispatched, service: Served) -> None:
    if list(times) != sorted(times):
        raise ConfigError(
            _contradiction(exchange, service, "is served before it is sent, on one host's clock")
        )


def _contradiction(exchange: Dispatched, service: Served, what: str) -> str:
    key = exchange.key
    return (
        f"{exchange.timeline.path} and {service.timeline.path} contradict each other: the exchange "
        f"of step {key.step}, layer {key.layer}, micro-batch {key.micro_batch} {what}; give "
        f"unchanged files of one run"
    )
