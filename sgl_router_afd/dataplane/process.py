"""python -m sgl_router_afd.dataplane.process: one relay process; the control process starts it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence

from sgl_router_afd.dataplane.channel import Channel
from sgl_router_afd.dataplane.client import ClientConnection
from sgl_router_afd.dataplane.counters import RelayCounters, SharedCounters
from sgl_router_afd.dataplane.messages import (
    Drain,
    Draining,
    Listening,
    Ping,
    Pong,
    Setup,
    Table,
    ToRelay,
)
from sgl_router_afd.dataplane.relay import Relay
from sgl_router_afd.event_loop import new_event_loop
from sgl_router_afd.log import start_log
from sglang_afd.process import die_with_parent

logger = logging.getLogger(__name__)

BACKLOG = 2048


def main(argv: Sequence[str] | None = None) -> None:
    """Relay until the control process says drain, or is gone."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the control process says when to end
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--counters", type=int, required=True)
    parser.add_argument("--listen", type=int, nargs="+", required=True)
    args = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(args.channel, args.counters, args.listen))


async def _serve(channel: int, counters: int, listening: Sequence[int]) -> None:
    control = _Control(counters)
    await asyncio.get_running_loop().create_unix_connection(
        lambda: control.channel, sock=socket.socket(fileno=channel)
    )
    relay = await control.relay
    loop = asyncio.get_running_loop()
    ports = [
        await loop.create_server(
            lambda: ClientConnection(relay), sock=socket.socket(fileno=number), backlog=BACKLOG
        )
        for number in listening
    ]
    watch = loop.create_task(relay.watch_deadlines())
    watch.add_done_callback(_end_on_a_bug)
    control.channel.send(Listening())
    timeout_s = await control.drain
    for port in ports:
        port.close()
    control.channel.send(Draining(num_running=relay.start_draining()))
    num_cut = await relay.drained(timeout_s)
    if num_cut:
        logger.warning("cut %d requests that were still running", num_cut)
    await asyncio.sleep(0)  # so that the connections are closed


class _Control:
    """The control process as seen from here."""

    def __init__(self, counters: int) -> None:
        loop = asyncio.get_running_loop()
        self.relay: asyncio.Future[Relay] = loop.create_future()  # once the servers are known
        self.drain: asyncio.Future[float] = loop.create_future()  # the time-out
        self.channel: Channel[ToRelay] = Channel(ToRelay, self._on_message, self._on_lost)
        self._counters = counters
        self._relay: Relay | None = None

    def _on_message(self, message: ToRelay) -> None:
        match message:
            case Setup():
                self._relay = self._set_up(message)
            case Table():
                assert self._relay is not None, "the setup comes before the first table"
                self._relay.servers.take(message)
                if not self.relay.done():
                    self.relay.set_result(self._relay)
            case Ping():
                self.channel.send(Pong())
            case Drain():
                self.drain.set_result(message.timeout_s)

    def _set_up(self, setup: Setup) -> Relay:
        start_log(setup.config.log_level)
        shared = SharedCounters(self._counters, setup.config.num_relays)
        return Relay(
            setup.config,
            RelayCounters(shared, setup.relay),
            setup.control_path,
            self.channel.send,
        )

    def _on_lost(self) -> None:
        os._exit(1)  # nobody is left whom a tidy end would serve


def _end_on_a_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("the relay's watch ended", exc_info=task.exception())
        os._exit(1)


if __name__ == "__main__":
    main()
