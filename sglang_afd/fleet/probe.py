"""Wait until every server says that it is ready, and say what the wait is for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from sglang_afd.fleet.console import Console
from sglang_afd.fleet.spec import ServerSpec

POLL_S = 0.25
POLL_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
PROGRESS_S = 5.0


async def wait_until_ready(
    servers: Sequence[ServerSpec], session: aiohttp.ClientSession, console: Console
) -> None:
    """Poll all servers until the last one is ready; there is no deadline, only progress."""
    started_at = time.monotonic()
    waiting_for = {server.name: "starting" for server in servers}

    def elapsed_s() -> int:
        return round(time.monotonic() - started_at)

    async def watch(server: ServerSpec) -> None:
        while missing := await _what_is_missing(session, server.status_url):
            waiting_for[server.name] = missing
            await asyncio.sleep(POLL_S)
        del waiting_for[server.name]
        console.progress(f"{server.name}: ready after {elapsed_s()} s")

    async def report() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            states = ", ".join(f"{name}: {state}" for name, state in waiting_for.items())
            console.progress(f"{states} ({elapsed_s()} s)")

    reporting = asyncio.create_task(report())
    try:
        async with asyncio.TaskGroup() as watches:
            for server in servers:
                watches.create_task(watch(server))
    finally:
        reporting.cancel()


async def _what_is_missing(session: aiohttp.ClientSession, url: str) -> str:
    """Empty when ready."""
    try:
        async with session.get(url, timeout=POLL_TIMEOUT) as response:
            if response.status != 200:
                return "starting"
            return missing_from(await response.json(content_type=None))
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return "starting"


def missing_from(status: Any) -> str:
    """What a status answer says is not there yet; empty when nothing is.

    Attention and MLP servers have a state, the router counts its attention servers.
    """
    match status:
        case {"state": "ready" | "spare"}:
            return ""
        case {"state": str(state), **rest}:
            reason = rest.get("reason")
            return f"{state} ({reason})" if reason else state
        case {"num_ready": int(num_ready), "num_servers": int(num_servers)}:
            is_whole = 0 < num_ready == num_servers
            return "" if is_whole else f"{num_ready} of {num_servers} connected"
        case _:
            return "answering something else than a status"
