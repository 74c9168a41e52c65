"""smg as the control process handles it: started, told of servers, watched, drained."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.counters import SharedCounters
from sgl_router_afd.dataplane.handle import MAX_SHORT_LIVES, SHORT_LIFE_S
from sgl_router_afd.dataplane.heartbeat import Heartbeat
from sgl_router_afd.dataplane.messages import NO_TABLE, BrokeOff, Table
from sgl_router_afd.gateway.manifest import Manifest, manifest_of, write
from sgl_router_afd.gateway.settings import flags, scheme
from sgl_router_afd.gateway.watch import Watch, read_workers
from sglang_afd.errors import AfdError, ConfigError
from sglang_afd.ports import free_ports

logger = logging.getLogger(__name__)

START_S = 30.0  # what smg gets to answer for the first time
END_S = 5.0  # what smg gets to end beyond the time that running requests get
WATCH_S = 1.0
SETTLE_S = 0.1  # between two looks while smg has not yet taken the latest manifest
ASK_S = 2.0  # what smg may take to answer
LOOK_AGAIN_S = 0.02  # while it starts
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where an address that means all is reached


class GatewayFailed(AfdError):
    """smg ends whenever it is started, or does not answer."""


class Gateway:
    """The data plane `smg`; see `DataPlane`.

    Args:
        config: The router's settings.
        address: Host and port for clients, both numbers.
        counters: Of one relay process, which smg takes the place of.
        session: For questions to smg.
        on_trouble: Told of servers where requests failed.
        directory: Of this router alone.
    """

    def __init__(
        self,
        config: RouterConfig,
        address: tuple[str, int],
        counters: SharedCounters,
        session: aiohttp.ClientSession,
        on_trouble: Callable[[BrokeOff], None],
        directory: Path,
    ) -> None:
        self._config = config
        self._address = address
        self._session = session
        self._watch = Watch(counters, on_trouble)
        self._own_key = uuid.uuid4().hex
        self._path = directory / "servers.json"
        self._manifest = manifest_of(NO_TABLE)
        self._is_unwritten = False  # it could not be: smg goes by the one before
        self._metrics_port = 0
        self._metrics = ""
        self._process: asyncio.subprocess.Process | None = None
        self._asking: asyncio.Task[None] | None = None  # whether smg lives
        self._is_listening = asyncio.Event()
        self._is_news = asyncio.Event()
        self._is_draining = False
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        try:
            write(self._manifest, self._path)
        except OSError as error:
            raise ConfigError(
                f"{self._path}, which tells smg of its servers, cannot be written: "
                f"{error.strerror}; set TMPDIR to a directory with room"
            ) from None
        await self._group.__aenter__()
        for work in (self._keep_running(), self._keep_watching()):
            self._tasks.append(self._group.create_task(work))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(kind, error, trace)

    async def wait_until_listening(self) -> None:
        await self._is_listening.wait()

    def publish(self, table: Table) -> None:
        """Have smg send requests to the servers of this table that serve."""
        manifest = manifest_of(table)
        self._watch.publish(table, manifest)
        if _who(manifest) != _who(self._manifest):
            self._manifest = manifest
            self._write()
            self._is_news.set()

    def _write(self) -> None:
        """Where that cannot be done all else goes on, and it is done as soon as it can."""
        try:
            write(self._manifest, self._path)
        except OSError as error:
            if not self._is_unwritten:
                logger.error(
                    "smg does not hear which servers serve now, since %s cannot be written: %s",
                    *(self._path, error.strerror),
                )
            self._is_unwritten = True
        else:
            self._is_unwritten = False

    def metrics(self) -> str:
        """smg's own, as of a second ago."""
        return self._metrics

    async def drain(self, timeout_s: float) -> None:
        """Have it accept nothing more, finish what runs, and end."""
        self._is_draining = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        _, late = await asyncio.wait(self._tasks[:1], timeout=timeout_s + END_S)
        if late:
            logger.warning("smg does not end; killing it")

    async def _keep_running(self) -> None:
        """Start it anew whenever it ends or hangs, until it was drained.

        Raises: GatewayFailed, when it never came to listen, or ends each time soon after its start.
        """
        loop = asyncio.get_running_loop()
        num_short_lives = 0
        while True:
            started_s = loop.time()
            ended = await self._run()
            self._watch.forget()
            if self._is_draining:
                return
            is_short = loop.time() - started_s < SHORT_LIFE_S
            num_short_lives = num_short_lives + 1 if is_short else 0
            what = f"smg {ended}"
            if not self._is_listening.is_set():
                raise GatewayFailed(f"{what} before it listened; see what it logged before")
            if num_short_lives >= MAX_SHORT_LIVES:
                raise GatewayFailed(
                    f"{what}, {num_short_lives} times within {SHORT_LIFE_S:g} s of its start; see "
                    "what it logged before"
                )
            logger.warning("%s; its requests are lost, another one takes its place", what)

    async def _run(self) -> str:
        """How it ended."""
        [self._metrics_port] = free_ports(1)
        given = flags(
            self._config,
            host=self._address[0],
            port=self._address[1],
            metrics_port=self._metrics_port,
            manifest=self._path,
            own_key=self._own_key,
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sgl_router_afd.gateway.process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            start_new_session=True,  # Ctrl-C is for this process, which then says when to end
        )
        self._process = process
        heartbeat = Heartbeat(lambda: self._ask_for_life(heartbeat), self._config.relay_timeout_s)
        try:
            if self._is_draining:  # since it was started: it has no request that it could finish
                return "was not needed any more"
            end = process.communicate(msgspec.json.encode(given))
            if await heartbeat.was_alive_until(end):
                return f"ended with exit code {await process.wait()}"
            return f"was silent for {self._config.relay_timeout_s:g} s and was killed"
        finally:
            if self._asking is not None:
                self._asking.cancel()
            self._process = None
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _ask_for_life(self, heartbeat: Heartbeat) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._wait_for_life(heartbeat))

    async def _wait_for_life(self, heartbeat: Heartbeat) -> None:
        """At its port for metrics, which requests that wait to be let in cannot fill."""
        while not self._is_draining:  # it may close that port long before its last request ends
            try:
                await self._ask(self._metrics_url, timeout_s=self._config.relay_timeout_s)
            except aiohttp.ClientResponseError:
                break
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(LOOK_AGAIN_S)
            else:
                break
        heartbeat.on_answer()

    async def _keep_watching(self) -> None:
        """Raises: GatewayFailed, when it never answers, or nothing that is understood."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + START_S
        while True:
            if self._is_unwritten:
                self._write()
            try:
                await self._look()
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
                logger.debug("smg does not answer: %s", error)
                if loop.time() > give_up_s and not self._is_listening.is_set():
                    raise GatewayFailed(
                        f"smg does not answer within {START_S:g} s: {error}"
                    ) from error
            is_up = self._is_listening.is_set()
            rest_s = (WATCH_S if self._watch.is_settled else SETTLE_S) if is_up else LOOK_AGAIN_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_news.wait(), rest_s)
            self._is_news.clear()

    async def _look(self) -> None:
        host, port = self._address
        url = _url(scheme(self._config), ANYWHERE.get(host, host), port)
        workers = read_workers(await self._ask(f"{url}/workers"))
        metrics = await self._ask(self._metrics_url)
        self._metrics = metrics.decode()
        self._watch.take(workers, self._metrics)
        self._is_listening.set()

    @property
    def _metrics_url(self) -> str:
        return f"http://127.0.0.1:{self._metrics_port}/metrics"

    async def _ask(self, url: str, *, timeout_s: float = ASK_S) -> bytes:
        async with self._session.get(
            url,
            headers={"Authorization": f"Bearer {self._own_key}"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            ssl=False,  # it is our own child, at an address of this host
            raise_for_status=True,
        ) as answer:
            return await answer.read()


def _who(manifest: Manifest) -> frozenset[object]:
    """To smg the order means nothing."""
    return frozenset((worker.id, worker.url, worker.model_id) for worker in manifest.workers)


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
