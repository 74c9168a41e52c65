"""Asks every server that does not register itself what it would register with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.static_servers import StaticServer, StaticServers
from sgl_router_afd.upstream_session import describe, read_at_most
from sglang_afd.protocol.paths import REGISTRATION_PATH
from sglang_afd.protocol.registration import MAX_MESSAGE_BYTES


@asynccontextmanager
async def polling(
    servers: StaticServers, session: aiohttp.ClientSession, config: RouterConfig
) -> AsyncIterator[None]:
    """Poll every URL while the body runs; a bug in a poller ends the body too."""
    pollers: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:

        def follow() -> None:
            wanted = {static.url: static for static in servers.all()}
            for url in pollers.keys() - wanted.keys():
                pollers.pop(url).cancel()
            for url in wanted.keys() - pollers.keys():
                pollers[url] = group.create_task(_poll(wanted[url], servers, session, config))

        servers.on_urls(follow)
        follow()
        try:
            yield
        finally:
            servers.on_urls(lambda: None)
            for poller in pollers.values():
                poller.cancel()


async def _poll(
    static: StaticServer,
    servers: StaticServers,
    session: aiohttp.ClientSession,
    config: RouterConfig,
) -> None:
    timeout = aiohttp.ClientTimeout(total=config.status_timeout_s)
    while True:
        try:
            async with session.get(
                static.url + REGISTRATION_PATH, timeout=timeout, allow_redirects=False
            ) as answer:
                status, body = answer.status, await read_at_most(answer, MAX_MESSAGE_BYTES)
        except TimeoutError:
            silence = f"GET {REGISTRATION_PATH} got no answer within {config.status_timeout_s} s"
            servers.on_silence(static, silence)
        except aiohttp.ClientError as error:
            tell = servers.on_refusal if _is_refusal(error) else servers.on_silence
            tell(static, describe(error))
        else:
            servers.on_answer(static, status, body)
        await asyncio.sleep(config.status_interval_s)


def _is_refusal(error: aiohttp.ClientError) -> bool:
    """Was no connection to be had? A name server that is away says nothing of the server."""
    is_no_connection = isinstance(error, aiohttp.ClientConnectorError)
    return is_no_connection and not isinstance(error, aiohttp.ClientConnectorDNSError)
