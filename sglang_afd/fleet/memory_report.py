"""What the servers really hold on their GPUs, beside what was planned."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from sglang_afd.fleet import overheads
from sglang_afd.fleet.console import Console
from sglang_afd.fleet.gpus import MIB
from sglang_afd.fleet.memory import MemoryPlan, ServerMemory
from sglang_afd.fleet.overheads import GIB
from sglang_afd.fleet.spec import ServerSpec
from sglang_afd.protocol.paths import STATUS_PATH

TOLERANCE = 0.1  # of what was planned
TIMEOUT = aiohttp.ClientTimeout(total=5.0)
SMI_S = 30.0
QUERY = ("--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits")


async def report_memory(
    plan: MemoryPlan,
    servers: Sequence[ServerSpec],
    session: aiohttp.ClientSession,
    console: Console,
) -> None:
    """Say for each server that was planned what it holds, and mark those that are far from it."""
    if not plan.servers:
        return
    driver = await bytes_by_process()
    for server in servers:
        planned = plan.servers.get(server.name)
        if planned is None or "--afd-spare" in server.argv:  # which holds nothing yet
            continue
        memory = await _memory_of(server, session)
        num_bytes = actual_bytes(memory, driver)
        console.progress(compare(planned, num_bytes, _items(memory)))


def actual_bytes(memory: Mapping[str, Any], driver: Mapping[int, int]) -> int:
    """What one process holds: as the driver says, or as it says itself; 0 is unknown.

    Args:
        memory: The server's own account, empty without one.
        driver: Bytes by process number. Empty where processes have other numbers for the driver.
    """
    by_driver = driver.get(memory.get("pid", -1), 0)
    if by_driver:
        return by_driver
    own = int(memory.get("total_bytes", 0))
    return own + overheads.CONTEXT_BYTES if own else 0


def compare(planned: ServerMemory, num_bytes: int, items: str = "") -> str:
    """One line: planned and real, and how far they are apart."""
    if not num_bytes:
        return f"{planned.name} does not tell what it holds; planned {_gib(planned.num_bytes)}"
    if not planned.is_whole:
        return f"memory of {planned.name}: {_gib(num_bytes)}, its cache sized by SGLang; {items}"
    off = num_bytes / planned.num_bytes - 1
    line = f"memory of {planned.name}: {_gib(num_bytes)}, planned {_gib(planned.num_bytes)}"
    line += f" ({off:+.1%})"
    line += f"; {items}" if items else ""
    return line if abs(off) <= TOLERANCE else f"warning: {line}"


async def bytes_by_process() -> dict[int, int]:
    """What the driver says that each process holds, clients of MPS among them."""
    try:
        process = await asyncio.create_subprocess_exec(
            "nvidia-smi", *QUERY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        text, _ = await asyncio.wait_for(process.communicate(), SMI_S)
    except (OSError, TimeoutError):
        return {}
    return read_processes(text.decode(errors="replace"))


def read_processes(text: str) -> dict[int, int]:
    """Bytes by process number; a process is listed once for each of its GPUs."""
    found: dict[int, int] = {}
    for line in text.splitlines():
        pid, _, used = (part.strip() for part in line.partition(","))
        if pid.isdigit() and used.isdigit():  # "[N/A]" where the driver does not know
            found[int(pid)] = found.get(int(pid), 0) + int(used) * MIB
    return found


async def _memory_of(server: ServerSpec, session: aiohttp.ClientSession) -> Mapping[str, Any]:
    path = STATUS_PATH if server.name.startswith("attn") else "/server_info"
    url = server.status_url.removesuffix(STATUS_PATH) + path
    try:
        async with session.get(url, timeout=TIMEOUT) as response:
            answer = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}
    memory = answer.get("memory") if isinstance(answer, dict) else None
    return memory if isinstance(memory, dict) else {}


def _items(memory: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removesuffix('_bytes')} {_gib(size)}"
        for name, size in memory.items()
        if name.endswith("_bytes") and name != "total_bytes"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
