"""Polls every attention server's status and tells the pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.endpoints import STATUS
from sgl_router_afd.pool import Server, ServerPool
from sgl_router_afd.readiness import judge
from sgl_router_afd.upstream_session import describe


@asynccontextmanager
async def watching(
    pool: ServerPool, session: aiohttp.ClientSession, config: RouterConfig
) -> AsyncIterator[None]:
    """Poll every server while the body runs; a bug in a watcher ends the body too."""
    async with asyncio.TaskGroup() as group:
        watchers = [
            group.create_task(_watch(server, pool, session, config)) for server in pool.servers
        ]
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()


async def _watch(
    server: Server, pool: ServerPool, session: aiohttp.ClientSession, config: RouterConfig
) -> None:
    timeout = aiohttp.ClientTimeout(total=config.status_timeout_s)
    while True:
        try:
            async with session.get(
                server.url + STATUS, timeout=timeout, allow_redirects=False
            ) as answer:
                verdict = judge(answer.status, await answer.read())
        except TimeoutError:
            pool.record_silence(
                server, f"GET {STATUS} got no answer within {config.status_timeout_s} s"
            )
        except aiohttp.ClientError as error:
            pool.record_unreachable(server, describe(error))
        else:
            pool.record_answer(server, verdict)
        await asyncio.sleep(config.status_interval_s)
