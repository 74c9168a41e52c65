"""Makes the fleet of one router process, and runs what it needs: timers, polls, probes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from sgl_router_afd.awake_clock import AwakeClock
from sgl_router_afd.config import RouterConfig
from sgl_router_afd.control.ledger import Ledger
from sgl_router_afd.control.plane import ControlPlane, Probe
from sgl_router_afd.control.ratio import parse_ratio
from sgl_router_afd.control.registry import LeaseTerms
from sgl_router_afd.dataplane.counters import SharedCounters
from sgl_router_afd.fleet import Fleet
from sgl_router_afd.pair_probe import make_probe
from sgl_router_afd.polling import polling
from sgl_router_afd.traffic import SAMPLE_S, TrafficBook
from sglang_afd.config import Role


def open_fleet(config: RouterConfig, counters: SharedCounters, ledger: Ledger) -> Fleet:
    """The fleet, which has been told of nobody yet; to be called in the event loop.

    Args:
        config: The router's settings.
        counters: Of all relay processes.
        ledger: What outlives this router.
    """
    clock = AwakeClock()
    book = TrafficBook(counters, clock)
    boot_id = uuid.uuid4().hex[:16]
    plane = ControlPlane(
        boot_id,
        ledger,
        started_s=clock(),
        ratio=parse_ratio(config.ratio),
        lease_terms=_lease_terms(config.lease_s),
        hold_s=config.hold_timeout_s,
        num_in_flight=book.num_in_flight,
    )
    loop = asyncio.get_running_loop()
    fleet = Fleet(plane, book, counters, boot_id=boot_id, clock=clock, call_later=loop.call_later)
    for role, urls in ((Role.MLP, config.mlp_urls), (Role.ATTN, config.attn_urls)):
        for url in urls:
            fleet.add_static(url, role)
    return fleet


@asynccontextmanager
async def running(
    fleet: Fleet, session: aiohttp.ClientSession, config: RouterConfig
) -> AsyncIterator[None]:
    """Poll, probe and count while the body runs; a bug in one of these ends the body too."""
    timeout_s = fleet.plane.probes.terms.timeout_s

    async def probe(one: Probe) -> None:
        outcome, detail = await make_probe(
            one, session, api_key=config.api_key, timeout_s=timeout_s
        )
        fleet.on_probe_end(one, outcome, detail)

    async with polling(fleet.static, session, config), asyncio.TaskGroup() as group:
        tasks = {group.create_task(_sample(fleet))}

        def start_probe(one: Probe) -> None:
            task = group.create_task(probe(one))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        fleet.probe_with(start_probe)
        try:
            yield
        finally:
            fleet.close()
            for task in tasks:
                task.cancel()


def _lease_terms(lease_s: float) -> LeaseTerms:
    return LeaseTerms(ttl_s=lease_s, renew_s=lease_s / 3, grace_s=lease_s)


async def _sample(fleet: Fleet) -> None:
    while True:
        fleet.sample()
        await asyncio.sleep(SAMPLE_S)
