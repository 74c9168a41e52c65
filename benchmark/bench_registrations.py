"""How long servers are without a router that is restarted: the real one, and simulated servers.

Groups of one MLP and seven attention servers register over HTTP, renew their leases, and register
again when the router was killed and started anew with its state file. Their probes are answered by
this script. Prints one JSON line; exit code 1 when a server that registered again was forgotten.

registrations_per_s  of servers that all come at once, by a router without any
restart_s            from the router's first answer after the restart until every server has a lease
serving_s            until every attention server serves, its pair probe included
worst_answer_ms      to a registration after the restart, and "renewal_answer_ms" the median to one
lease_s              what restart_s is to be less than

    python benchmark/bench_registrations.py [--servers 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # where sglang_afd is not installed

import provenance  # noqa: E402

from sglang_afd.config import Role  # noqa: E402
from sglang_afd.ports import free_ports  # noqa: E402
from sglang_afd.protocol.paths import SERVERS_PATH  # noqa: E402
from sglang_afd.protocol.registration import (  # noqa: E402
    REGISTRATION_VERSION,
    Capacity,
    Condition,
    Lease,
    Load,
    Registration,
    Renewal,
    Report,
    Shard,
    decode_from_router,
    encode,
)

ATTN_PER_GROUP = 7
LEASE_S = 6.0
RETRY_S = 4.0  # the longest that a server pauses between two attempts: 2/3 of a lease
NO_LOAD = Load(
    num_running=0, num_waiting=0, free_kv_tokens=10_000, tokens_per_s=0.0, expert_imbalance=0.0
)


@dataclass
class Board:
    """What all servers saw; times are those of one clock."""

    registered: list[tuple[float, float]] = field(default_factory=list)  # when, and how long
    renewed_s: list[float] = field(default_factory=list)
    num_forgotten: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by what the router answered


class Server:
    """One that does what a registrar does."""

    def __init__(self, index: int, port: int, board: Board) -> None:
        group, place = divmod(index, ATTN_PER_GROUP + 1)
        self.name = f"{'attn' if place else 'mlp'}-{group}-{place}"
        self._role = Role.ATTN if place else Role.MLP
        self._url = f"http://127.{1 + index // 60000}.{index // 250 % 240}.{1 + index % 250}:{port}"
        self._attached = (f"mlp-{group}-0.boot",) if place else ()
        self._board = board
        self._seq = 0
        self.lease: Lease | None = None
        self.num_leases = 0

    async def live(self, session: aiohttp.ClientSession, router: str) -> None:
        """Register, renew, and register again, until cancelled."""
        pause_s = 0.5
        while True:
            try:
                await self._say(session, router)
                pause_s, wait_s = 0.5, self.lease.renew_s if self.lease else 0.0
            except (aiohttp.ClientError, TimeoutError):
                wait_s = pause_s * (0.5 + random.random() / 2)
                pause_s = min(2 * pause_s, RETRY_S)
            await asyncio.sleep(wait_s)

    async def _say(self, session: aiohttp.ClientSession, router: str) -> None:
        lease, began_s = self.lease, time.monotonic()
        message = self._registration() if lease is None else self._renewal(lease)
        async with session.post(router + SERVERS_PATH, data=encode(message)) as answer:
            status, body = answer.status, await answer.read()
        if status not in (200, 409):
            self._board.refused[f"{status} {body[:200].decode(errors='replace')}"] += 1
            raise aiohttp.ClientError  # a registrar tries again later, too
        took_s = time.monotonic() - began_s
        heard = decode_from_router(body)
        if not isinstance(heard, Lease):
            self._board.num_forgotten += lease is not None
            self.lease = None
            return
        if lease is None:
            self.num_leases += 1
            self._board.registered.append((time.monotonic(), took_s))
        else:
            self._board.renewed_s.append(took_s)
        self.lease = heard

    def _registration(self) -> Registration:
        is_attn = self._role is Role.ATTN
        return Registration(
            version=REGISTRATION_VERSION,
            server_id=self.name,
            boot_id=f"{self.name}.boot",
            started_at_s=1.0,
            sent_at_s=time.time(),
            role=self._role,
            models=("simulated",) if is_attn else (),
            fingerprint="ab" * 32,
            num_experts=128,
            url=self._url,
            exchange_address="" if is_attn else "tcp://127.0.0.1:1",
            shard=None if is_attn else Shard(ep_rank=0, ep_size=1, first_expert=0, stop_expert=128),
            peer_urls=(),
            capacity=Capacity(max_running_requests=64, kv_tokens=10_000),
            group="",
            epoch=0,
            report=self._report(),
        )

    def _renewal(self, lease: Lease) -> Renewal:
        return Renewal(
            version=REGISTRATION_VERSION,
            server_id=self.name,
            boot_id=f"{self.name}.boot",
            lease_id=lease.lease_id,
            sent_at_s=time.time(),
            report=self._report(),
        )

    def _report(self) -> Report:
        self._seq += 1
        return Report(
            seq=self._seq,
            condition=Condition.READY,
            reason="",
            attached=self._attached,
            lost=(),
            load=NO_LOAD,
            is_draining=False,
        )


@asynccontextmanager
async def answering_probes() -> AsyncIterator[int]:
    """One process stands for all servers, at every address of this host; yields the port."""

    async def generate(_request: web.Request) -> web.Response:
        return web.json_response({"text": "a", "meta_info": {"completion_tokens": 1}})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    [port] = free_ports(1)
    await web.TCPSite(runner, "0.0.0.0", port, backlog=2048).start()
    try:
        yield port
    finally:
        await runner.cleanup()


@asynccontextmanager
async def running_router(
    session: aiohttp.ClientSession, port: int, state: Path
) -> AsyncIterator[float]:
    """A router process until the body ends; yields when it answered first."""
    flags = ("--port", str(port), "--state-file", str(state), "--lease-s", str(LEASE_S))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sgl_router_afd.launch_router", *flags, "--relay-processes", "1"),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield await _first_answer_s(session, f"http://127.0.0.1:{port}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _first_answer_s(session: aiohttp.ClientSession, router: str) -> float:
    while True:
        try:
            async with session.get(router + "/health") as answer:
                if answer.status == 200:
                    return time.monotonic()
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.02)


async def _all_serve_s(session: aiohttp.ClientSession, router: str, num_attn: int) -> float:
    while True:
        async with session.get(router + "/health") as answer:
            if (await answer.json())["num_ready"] == num_attn:
                return time.monotonic()
        await asyncio.sleep(0.1)


async def _all_have_a_lease(servers: list[Server], num_leases: int) -> None:
    while any(server.num_leases < num_leases for server in servers):
        await asyncio.sleep(0.01)


async def measure(num_servers: int, state: Path) -> dict[str, object]:
    """Start, register, kill, start, register again, renew."""
    board, [port] = Board(), free_ports(1)
    router = f"http://127.0.0.1:{port}"
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # as servers do
    timeout = aiohttp.ClientTimeout(total=3.0)
    async with (
        answering_probes() as probe_port,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        servers = [Server(index, probe_port, board) for index in range(num_servers)]
        num_attn = sum(server.name.startswith("attn") for server in servers)
        async with running_router(session, port, state) as first_s:
            lives = [tasks.create_task(server.live(session, router)) for server in servers]
            await _all_have_a_lease(servers, 1)
            took_s = max(when_s for when_s, _ in board.registered) - first_s
            await _all_serve_s(session, router, num_attn)
        board.registered.clear()
        async with running_router(session, port, state) as again_s:
            await _all_have_a_lease(servers, 2)
            restart_s = max(when_s for when_s, _ in board.registered) - again_s
            serving_s = await _all_serve_s(session, router, num_attn) - again_s
            board.num_forgotten = 0
            board.renewed_s.clear()
            await asyncio.sleep(2 * LEASE_S)
            for life in lives:
                life.cancel()
    return {
        "num_servers": num_servers,
        "registrations_per_s": round(num_servers / took_s),
        "restart_s": round(restart_s, 2),
        "serving_s": round(serving_s, 2),
        "worst_answer_ms": round(1000 * max(took_s for _, took_s in board.registered), 1),
        "renewal_answer_ms": round(1000 * statistics.median(board.renewed_s), 2),
        "lease_s": LEASE_S,
        "num_forgotten": board.num_forgotten,
        "refused": dict(board.refused.most_common(5)),
        "commit": provenance.commit(),
        "cpu": provenance.cpu_name(),
    }


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", type=int, default=1000, help="how many; 8 make a group")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(measure(arguments.servers, Path(directory) / "state.json"))
    print(json.dumps(result))
    return int(result["num_forgotten"] != 0)


if __name__ == "__main__":
    sys.exit(main())
