"""Run servers while something uses them; when it ends, or one of them does, none is left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

from sglang_afd.errors import AfdError
from sglang_afd.fleet.console import Console
from sglang_afd.fleet.guard import Guard
from sglang_afd.fleet.interrupts import Interrupts
from sglang_afd.fleet.process import ServerProcess
from sglang_afd.fleet.spares import Spares
from sglang_afd.fleet.spec import ServerSpec

GRACE_S = 10.0  # from the request to stop until the kill
KILL_S = 2.0  # for a killed group to disappear
DRAIN_S = 0.5  # for the last lines of a server that ended by itself


class ServerExited(AfdError):
    """A server ended while the fleet was in use."""


async def run_fleet(
    servers: Sequence[ServerSpec],
    use: Coroutine[Any, Any, None],
    console: Console,
    *,
    grace_s: float = GRACE_S,
    spares: Spares | None = None,
) -> int:
    """Start every server, use them, stop every server.

    Args:
        servers: What to start, all at once.
        use: What the servers are for; cancelled when a server ends or a signal asks to stop.
        console: Shows the servers' output.
        grace_s: How long a server may take to stop before it is killed.
        spares: So many servers that have spares may end; None is none.
    Returns: Exit code: 0, or 128 + the signal that asked to stop.
    Raises: ServerExited, with the server's last lines; whatever `use` raises.
    """
    interrupts = Interrupts()
    processes: list[ServerProcess] = []
    using = asyncio.create_task(use)
    with Guard() as guard:
        try:
            for spec in servers:
                processes.append(_start(spec, guard, console))
            ending = _first_loss(processes, spares or Spares(0), console)
            await _until_first(using, ending, interrupts.stop.wait())
        finally:
            interrupts.stop.set()  # from here on a signal means: at once
            console.progress("stopping the servers; Ctrl-C kills them at once")
            await _stop(processes, interrupts.kill, grace_s)
    return interrupts.exit_code


def _start(spec: ServerSpec, guard: Guard, console: Console) -> ServerProcess:
    process = ServerProcess(spec, lambda line: console.server_line(spec.name, line))
    guard.watch(process.process_group)
    return process


async def _until_first(*work: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    """Wait for one of these to end, cancel the others, raise what it raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


async def _first_loss(processes: Sequence[ServerProcess], spares: Spares, console: Console) -> None:
    """Until a server ends that no spare replaces."""
    ends = {asyncio.create_task(process.wait()): process for process in processes}
    try:
        while True:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                process, ended = ends.pop(task), _ended(task.result())
                if not process.has_spares or not spares.take():
                    await _raise(process, ended)
                console.progress(
                    f"{process.name} {ended}; a spare takes its place, {spares.left} left"
                )
    finally:
        for task in ends:
            task.cancel()


async def _raise(process: ServerProcess, ended: str) -> NoReturn:
    await process.drain_output(DRAIN_S)
    last_lines = "".join(f"\n  {line}" for line in process.tail) or " nothing"
    raise ServerExited(f"{process.name} {ended}; its last lines:{last_lines}")


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


async def _stop(processes: Sequence[ServerProcess], kill: asyncio.Event, grace_s: float) -> None:
    for stage in sorted({process.stop_stage for process in processes}):
        members = [process for process in processes if process.stop_stage == stage]
        await _stop_together(members, kill, grace_s)


async def _stop_together(
    processes: Sequence[ServerProcess], kill: asyncio.Event, grace_s: float
) -> None:
    for process in processes:
        process.terminate()
    all_ended: asyncio.Future[Any] = asyncio.gather(*(process.wait() for process in processes))
    killing: asyncio.Future[Any] = asyncio.create_task(kill.wait())
    await asyncio.wait([all_ended, killing], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    killing.cancel()
    # A server that ended may have left children behind, so every group is killed.
    await asyncio.gather(*(process.kill_group(KILL_S) for process in processes))
    await all_ended
