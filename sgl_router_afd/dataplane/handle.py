"""One relay process as the control process handles it: started, watched, replaced, drained."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable

from sgl_router_afd.dataplane.channel import Channel
from sgl_router_afd.dataplane.counters import SharedCounters
from sgl_router_afd.dataplane.heartbeat import Heartbeat
from sgl_router_afd.dataplane.messages import (
    NO_TABLE,
    BrokeOff,
    Drain,
    Draining,
    Listening,
    Ping,
    Pong,
    Setup,
    ToControl,
    Unreachable,
    encode,
)
from sglang_afd.errors import AfdError

logger = logging.getLogger(__name__)

# A process that ends so soon after its start would do so again.
SHORT_LIFE_S = 5.0
MAX_SHORT_LIVES = 3


class RelayFailed(AfdError):
    """A relay process ends whenever it is started."""


class RelayHandle:
    """Keeps one relay process running.

    Args:
        setup: Its first message.
        counters: Shared with it.
        listeners: Its sockets; they stay open here, and with them the connections that wait.
        on_trouble: Told of servers that refuse connections or break off.
    """

    def __init__(
        self,
        setup: Setup,
        counters: SharedCounters,
        listeners: list[socket.socket],
        on_trouble: Callable[[Unreachable | BrokeOff], None],
    ) -> None:
        self._setup = setup
        self._counters = counters
        self._listeners = listeners
        self._on_trouble = on_trouble
        self._table = encode(NO_TABLE)
        self._channel: Channel[ToControl] | None = None
        self._heartbeat: Heartbeat | None = None
        self._is_draining = False
        self._num_running: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.is_listening = asyncio.Event()

    async def keep_running(self) -> None:
        """Start it anew whenever it ends or hangs, until it was drained.

        Raises: RelayFailed, when it ends each time soon after its start.
        """
        loop = asyncio.get_running_loop()
        num_short_lives = 0
        while True:
            started_s = loop.time()
            ended = await self._run()
            self._counters.forget_running(self._setup.relay)
            if self._is_draining:
                self._set_num_running(0)
                return
            is_short = loop.time() - started_s < SHORT_LIFE_S
            num_short_lives = num_short_lives + 1 if is_short else 0
            what = f"relay process {self._setup.relay} {ended}"
            if num_short_lives >= MAX_SHORT_LIVES:
                raise RelayFailed(
                    f"{what}, {num_short_lives} times within {SHORT_LIFE_S:g} s of its start; see "
                    "what it logged before"
                )
            logger.warning("%s; its requests are lost, another one takes its place", what)

    def send_table(self, table: bytes) -> None:
        """Make this the table, as `messages.encode` writes it."""
        self._table = table
        if self._channel is not None:
            self._channel.send_latest(table)

    async def start_draining(self, timeout_s: float) -> int:
        """Have it accept nothing more; returns how many requests still run."""
        self._is_draining = True
        num_running = 0
        if self._channel is not None:
            self._channel.send(Drain(timeout_s=timeout_s))
            num_running = await self._num_running
        for listener in self._listeners:
            # A process that is about to end holds it, too; this refuses connections at once.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        return num_running

    async def _run(self) -> str:
        """How it ended."""
        ours, theirs = socket.socketpair()
        listening = [listener.fileno() for listener in self._listeners]
        with ours, theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "sgl_router_afd.dataplane.process"),
                *("--channel", str(theirs.fileno())),
                *("--counters", str(self._counters.descriptor)),
                *("--listen", *map(str, listening)),
                pass_fds=(theirs.fileno(), self._counters.descriptor, *listening),
                stdin=asyncio.subprocess.DEVNULL,
            )
            theirs.close()
            try:
                if await self._talk(ours.dup()):
                    return f"ended with exit code {await process.wait()}"
                return f"was silent for {self._setup.config.relay_timeout_s:g} s and was killed"
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def _talk(self, opened: socket.socket) -> bool:
        """Speak with it until it closes the channel, which it does by ending; not when it hangs."""
        loop = asyncio.get_running_loop()
        is_lost = asyncio.Event()
        channel: Channel[ToControl] = Channel(ToControl, self._on_message, is_lost.set)
        await loop.create_unix_connection(lambda: channel, sock=opened)
        if self._is_draining:  # since it was started: it has no request that it could finish
            channel.close()
            return False
        channel.send(self._setup)
        channel.send_latest(self._table)
        self._channel = channel
        self._heartbeat = Heartbeat(
            lambda: channel.send(Ping()), self._setup.config.relay_timeout_s
        )
        try:
            return await self._heartbeat.was_alive_until(is_lost.wait())
        finally:
            self._channel = self._heartbeat = None
            channel.close()

    def _on_message(self, message: ToControl) -> None:
        match message:
            case Listening():
                self.is_listening.set()
            case Pong():
                if self._heartbeat is not None:
                    self._heartbeat.on_answer()
            case Unreachable() | BrokeOff():
                self._on_trouble(message)
            case Draining():
                self._set_num_running(message.num_running)

    def _set_num_running(self, number: int) -> None:
        if not self._num_running.done():
            self._num_running.set_result(number)
