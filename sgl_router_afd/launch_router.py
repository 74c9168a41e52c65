"""python -m sgl_router_afd.launch_router: pairs servers, and is their one HTTP endpoint."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from sgl_router_afd.app import build_app
from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.counters import SharedCounters
from sgl_router_afd.dataplane.handle import RelayFailed
from sgl_router_afd.dataplane.listen import BACKLOG
from sgl_router_afd.dataplane.plane import DataPlane
from sgl_router_afd.dataplane.supervisor import Relays
from sgl_router_afd.doors import Doors, open_doors
from sgl_router_afd.event_loop import new_event_loop
from sgl_router_afd.flags import parse_args
from sgl_router_afd.fleet import Fleet
from sgl_router_afd.gateway import settings
from sgl_router_afd.gateway.installed import check_version
from sgl_router_afd.gateway.supervisor import Gateway, GatewayFailed
from sgl_router_afd.log import start_log
from sgl_router_afd.open_fleet import open_fleet, running
from sgl_router_afd.own_directory import own_directory
from sgl_router_afd.state_file import State, open_state
from sgl_router_afd.surprises import surprises
from sgl_router_afd.upstream_session import open_session
from sglang_afd.errors import ConfigError
from sglang_afd.process import announce_as_parent

logger = logging.getLogger(__name__)

# The router's own endpoints answer at once.
CLEANUP_TIMEOUT_S = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Returns: The exit code: 0 after a signal, 1 when what relays cannot be kept running, 2 for a
        mistake on the command line, in a file that it names, or an address that cannot be had.
    """
    config = parse_args(argv)
    start_log(config.log_level)
    announce_as_parent()
    _allow_many_connections()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve(config))
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    except ExceptionGroup as group:
        failures, others = group.split((RelayFailed, GatewayFailed))
        if others is not None:
            raise
        for failure in _each(failures):
            logger.error("%s", failure)
        return 1
    return 0


def _each(error: Exception | None) -> Iterator[Exception]:
    """What failed, out of the groups that task groups make of it."""
    if isinstance(error, ExceptionGroup):
        for part in error.exceptions:
            yield from _each(part)
    elif error is not None:
        yield error


async def serve(config: RouterConfig) -> None:
    """Serve until a signal arrives, then let running requests finish.

    Raises: ConfigError, when the address cannot be listened on, or the data plane cannot do what it
        was asked to; RelayFailed or GatewayFailed in a group.
    """
    if config.data_plane == "smg":
        settings.check(config)
        check_version()
    doors = open_doors(config)
    counters = SharedCounters.create(config.num_relays)
    with open_state(config.state_file) as state:
        await _serve(config, doors, counters, state)


async def _serve(
    config: RouterConfig, doors: Doors, counters: SharedCounters, state: State
) -> None:
    fleet = open_fleet(config, counters, state.ledger)
    for text in surprises(config):
        logger.warning("%s", text)
    open_plane = _open_gateway if config.data_plane == "smg" else _open_relays
    async with (
        open_session(config) as session,
        open_plane(config, doors, fleet, counters, session) as plane,
    ):
        fleet.publish_to(plane.publish)
        await plane.wait_until_listening()
        async with running(fleet, session, config):
            stop = _StopSignal()  # before anybody is told that it listens, and may stop it
            logger.info(
                "listening on %s, policy %s, %d servers to ask, %s",
                *(
                    _url(config, doors),
                    config.policy,
                    len(fleet.statics()),
                    _what_relays(config, doors),
                ),
            )
            await stop.wait()
            if not doors.own:
                # Nobody is heard any more, and a successor may have the port, and needs the file.
                state.let_go()
            await plane.drain(config.shutdown_timeout_s)


@asynccontextmanager
async def _open_relays(
    config: RouterConfig,
    doors: Doors,
    fleet: Fleet,
    counters: SharedCounters,
    _session: aiohttp.ClientSession,
) -> AsyncIterator[DataPlane]:
    async with (
        _own_endpoints(build_app(config, fleet, counters)) as control_path,
        Relays(config, counters, doors.relays, control_path, fleet.on_trouble) as relays,
    ):
        yield relays


@asynccontextmanager
async def _open_gateway(
    config: RouterConfig,
    doors: Doors,
    fleet: Fleet,
    counters: SharedCounters,
    session: aiohttp.ClientSession,
) -> AsyncIterator[DataPlane]:
    with own_directory() as directory:
        gateway = Gateway(config, doors.address, counters, session, fleet.on_trouble, directory)
        app = build_app(config, fleet, counters, gateway.metrics)
        async with _serving(app) as runner, gateway:
            for listener in doors.own:
                await web.SockSite(runner, listener).start()
            yield gateway


def _url(config: RouterConfig, doors: Doors) -> str:
    """For clients."""
    return doors.url.replace("http", settings.scheme(config), 1)


def _what_relays(config: RouterConfig, doors: Doors) -> str:
    if config.data_plane == "relay":
        return f"{config.num_relays} relay processes"
    return f"through smg {check_version()}; servers register and people look at {doors.own_url}"


@asynccontextmanager
async def _own_endpoints(app: web.Application) -> AsyncIterator[str]:
    """Serve the application on a Unix socket of this user; yields its path."""
    with own_directory() as directory:
        async with _serving(app) as runner:
            path = str(directory / "control")
            # A Unix socket refuses at once where a TCP one waits, and all servers that lost a
            # router may come in the same moment.
            try:
                await web.UnixSite(runner, path, backlog=BACKLOG).start()
            except OSError as error:  # its path may be too long for one
                raise ConfigError(
                    f"cannot listen on the router's own socket {path}: {error}; set TMPDIR to a "
                    "short path that the router may write to"
                ) from None
            yield path


@asynccontextmanager
async def _serving(app: web.Application) -> AsyncIterator[web.AppRunner]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLEANUP_TIMEOUT_S)
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


class _StopSignal:
    """Takes the first SIGTERM or SIGINT; later ones do what they do to any process."""

    def __init__(self) -> None:
        self._came = asyncio.Event()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._came.set)

    async def wait(self) -> None:
        await self._came.wait()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)


def _allow_many_connections() -> None:
    """Every request needs two descriptors, and the soft limit is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
