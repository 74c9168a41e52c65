"""The MLP role's HTTP process: health, metrics, server info, and the group's register.

A process of its own, so that the loop's process runs nothing but the loop; and started first, so
that it can wait as a spare and keep a lease while the loop's process loads.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
import time
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from aiohttp import web

from sglang_afd.errors import ConfigError
from sglang_afd.mlp.board import Board, Counter
from sglang_afd.mlp.board_metrics import render
from sglang_afd.mlp.facts import MlpFacts, Name
from sglang_afd.mlp.group import Group, MemberReport
from sglang_afd.mlp.membership import (
    MEMBERS_PATH,
    NOT_THE_LEADER,
    PROOF_HEADER,
    REFUSED,
    Membership,
)
from sglang_afd.mlp.place import NO_RANK, Place
from sglang_afd.process import die_with_parent
from sglang_afd.protocol import auth
from sglang_afd.protocol.paths import REGISTRATION_PATH, STATUS_PATH
from sglang_afd.registrar.drain import TURN_S, Drain
from sglang_afd.registrar.registrar import DRAINING, Registrar
from sglang_afd.transport.addresses import replace_wildcard

logger = logging.getLogger(__name__)

MAX_SKEW_S = 60.0  # between the clocks of two ranks' hosts


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """What the HTTP process needs to know at its start; picklable."""

    info: dict[str, Any]  # what /server_info answers before the experts are loaded
    report: MemberReport  # with NO_RANK for a spare, and without an exchange address
    leader_urls: tuple[str, ...]  # where rank 0 may be
    secret: bytes
    name: Name
    router_urls: tuple[str, ...] = ()
    drain_timeout_s: float = 0.0

    @property
    def asks_first(self) -> bool:
        """Is the rank to load known only after looking around?"""
        return self.report.rank == NO_RANK or (self.report.rank == 0 and bool(self.leader_urls))


@dataclass(frozen=True, kw_only=True)
class Serving:
    """From the loop's process, when the experts are loaded."""

    info: dict[str, Any]
    exchange_address: str


class FromLoop(Enum):
    """Other words of the loop's process."""

    DRAIN = auto()  # this server was asked to end; say `ToLoop.DRAINED` when it may
    STOP = auto()  # end now


class ToLoop(Enum):
    """Words to the loop's process, beside the rank to load."""

    DRAINED = auto()


def serve(listener: socket.socket, board: Board, options: HttpOptions, pipe: Connection) -> None:
    """Entry point of the process; returns when it is told to terminate.

    Args:
        listener: Bound; listened on here.
        board: Of the loop's process.
        options: Who this server is.
        pipe: Says the rank to load where the loop's process cannot know it; takes a `Serving`, and
            a `FromLoop`.
    """
    die_with_parent()
    logging.basicConfig(format="[%(asctime)s] %(message)s", level=logging.INFO)
    asyncio.run(_serve(listener, board, options, pipe))


async def _serve(
    listener: socket.socket, board: Board, options: HttpOptions, pipe: Connection
) -> None:
    place = make_place(board, options)
    registrar = Registrar(
        MlpFacts(options.name, place, board),
        urls=options.router_urls,
        secret=options.secret,
        told=board.told,
    )
    membership = Membership(
        place, options.leader_urls, options.secret, pipe.send, told=board.told.read
    )
    runner = web.AppRunner(build_app(board, place, options.secret, registrar), access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    registrar.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    ending = _Ending(stop, registrar, board, pipe, options.drain_timeout_s)

    def hear() -> None:
        try:
            word = pipe.recv()
        except EOFError:  # the loop's process is ending
            loop.remove_reader(pipe.fileno())
            return
        match word:
            case Serving(info=info, exchange_address=exchange_address):
                place.serve(info, exchange_address)
                membership.hurry()
            case FromLoop.DRAIN:
                ending.drain()
            case FromLoop.STOP:
                stop.set()

    def on_sigterm() -> None:
        # An orchestrator may signal every process; the loop's has the last word while it serves.
        if options.router_urls and place.report.exchange_address and not ending.has_begun:
            ending.drain()
        else:
            stop.set()

    loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_reader(pipe.fileno(), hear)
    task = asyncio.create_task(_be_member(membership, place, options))
    task.add_done_callback(partial(_ended, stop))
    await stop.wait()
    task.cancel()
    await asyncio.to_thread(registrar.stop)
    await runner.cleanup()


class _Ending:
    """Drains this server once it is asked to end."""

    def __init__(
        self,
        stop: asyncio.Event,
        registrar: Registrar,
        board: Board,
        pipe: Connection,
        timeout_s: float,
    ) -> None:
        self._stop = stop
        self._registrar = registrar
        self._board = board
        self._pipe = pipe
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        return self._task is not None

    def drain(self) -> None:
        """Begin; the second time nothing happens."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        drain = Drain(self._registrar, self._is_idle, self._timeout_s)
        while not drain.is_over():
            await asyncio.sleep(TURN_S)
        try:
            self._pipe.send(ToLoop.DRAINED)
        except OSError:  # the loop's process has ended meanwhile
            self._stop.set()

    def _is_idle(self) -> bool:
        # The router knows whether those that are attached have requests.
        return self._registrar.may_stop is True or self._board.read()[Counter.PEERS] == 0


def _ended(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    if task.cancelled() or task.exception() is None:
        return
    # Our own bug; without reports this server would be useless.
    logger.error("the membership ended", exc_info=task.exception())
    stop.set()


async def _be_member(membership: Membership, place: Place, options: HttpOptions) -> None:
    if options.asks_first:
        await membership.wait_and_report(owns_rank_0=options.report.rank == 0)
    elif place.group is None:
        await membership.keep_reporting()


def make_place(board: Board, options: HttpOptions) -> Place:
    """The place of a server that has just started; rank 0 without others to ask leads."""
    place = Place(options.info, options.report, board)
    if options.report.rank == NO_RANK:
        place.wait("looking for the group")
    elif options.asks_first:
        place.report = msgspec.structs.replace(options.report, rank=NO_RANK)
    elif options.report.rank == 0:
        place.lead(is_successor=False)
    return place


def build_app(board: Board, place: Place, secret: bytes, registrar: Registrar) -> web.Application:
    """The routes of one server."""
    endpoints = Endpoints(board, place, secret, registrar)
    app = web.Application(client_max_size=64 * 1024)
    app.add_routes(
        [
            web.get("/health", endpoints.health),
            web.get("/metrics", endpoints.metrics),
            web.get("/server_info", endpoints.server_info),
            web.get("/get_server_info", endpoints.server_info),
            web.get(STATUS_PATH, endpoints.status),
            web.get(REGISTRATION_PATH, endpoints.registration),
            web.post(MEMBERS_PATH, endpoints.members),
        ]
    )
    return app


class Endpoints:
    """What each path answers."""

    def __init__(self, board: Board, place: Place, secret: bytes, registrar: Registrar) -> None:
        self._board = board
        self._place = place
        self._secret = secret
        self._registrar = registrar

    async def health(self, request: web.Request) -> web.Response:
        is_well, (state, reason) = self._place.is_well(), self._place.state()
        body = {"healthy": is_well, "reason": reason, "state": state}
        if self._place.report.exchange_address:
            body["loop_age_s"] = round(self._board.age_s(), 3)
        return web.json_response(body, status=200 if is_well else 503)

    async def status(self, request: web.Request) -> web.Response:
        state, reason = self._place.state()
        is_draining = self._registrar.is_draining and state == "ready"
        return web.json_response(
            {
                "role": "mlp",
                "state": DRAINING if is_draining else state,
                "reason": reason,
                "router": self._registrar.status(),
                "attached_peers": self._board.read()[Counter.PEERS],
            }
        )

    async def registration(self, request: web.Request) -> web.Response:
        return web.Response(body=self._registrar.registration(), content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        place = self._place
        text = b""  # of a server that has no experts yet
        if place.report.exchange_address:
            text = render(self._board, rank=place.rank, first_expert=place.info["first_expert"])
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def server_info(self, request: web.Request) -> web.Response:
        state, _ = self._place.state()
        info = self._place.info | {"state": state}
        if self._place.rank != NO_RANK:
            info["ep_rank"] = self._place.rank
        if self._place.group is not None:
            info |= _described(self._place.group)
        return web.json_response(info)

    async def members(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            self.accept(body, request.headers.get(PROOF_HEADER, ""), request.remote or "")
        except (ConfigError, msgspec.MsgspecError) as error:
            logger.warning("refused a member report from %s: %s", request.remote, error)
            status = NOT_THE_LEADER if self._place.group is None else REFUSED
            return web.json_response({"error": str(error)}, status=status)
        return web.json_response({"ok": True})

    def accept(self, body: bytes, proof: str, remote: str) -> None:
        """Take a member's report.

        Args:
            body: A `MemberReport` as JSON.
            proof: That its sender knows the secret.
            remote: The address that it came from.

        Raises:
            ConfigError: This is not rank 0, a wrong proof, or what `Group.report` refuses.
            msgspec.MsgspecError: Not a report.
        """
        group = self._place.group
        if group is None:
            raise ConfigError("this is not rank 0; give --afd-leader the address of rank 0")
        if not self._secret and not auth.is_loopback(remote):
            raise ConfigError("members from other hosts need the same --afd-secret-file")
        expected = auth.prove(self._secret, "member", body).hex()
        if not hmac.compare_digest(proof.encode(errors="replace"), expected.encode()):
            raise ConfigError("the member's secret is not rank 0's; use the same --afd-secret-file")
        report = msgspec.json.decode(body, type=MemberReport)
        if abs(time.time() - report.sent_at_s) > MAX_SKEW_S:
            raise ConfigError(f"the report is older than {MAX_SKEW_S:g} s; are the clocks set?")
        address = replace_wildcard(report.exchange_address, remote)
        group.report(msgspec.structs.replace(report, exchange_address=address))


def _described(group: Group) -> dict[str, Any]:
    return {
        "group": [
            {
                "rank": member.rank,
                "boot_id": member.boot_id,
                "exchange_address": member.exchange_address,
            }
            for member in group.members()
        ],
        "missing_ranks": group.missing(),
        "loading_ranks": group.loading(),
        "claimable_ranks": group.claimable(),
    }
