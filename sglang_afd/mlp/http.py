"""The MLP role's HTTP process: health, metrics, server info, and the group's register.

A process of its own, so that the loop's process runs nothing but the loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from sglang_afd.errors import ConfigError
from sglang_afd.mlp.board import Board, Counter, State
from sglang_afd.mlp.board_metrics import render
from sglang_afd.mlp.group import RENEW_S, Group, MemberReport
from sglang_afd.process import die_with_parent
from sglang_afd.protocol import auth
from sglang_afd.protocol.paths import STATUS_PATH
from sglang_afd.transport.addresses import replace_wildcard

logger = logging.getLogger(__name__)

LOOP_AGE_LIMIT_S = 60.0  # beyond it /health says that the loop hangs; an expert run is shorter
MAX_SKEW_S = 60.0  # between the clocks of two ranks' hosts
PROOF_HEADER = "X-Afd-Proof"
MEMBERS_PATH = "/afd/v1/members"


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """What the HTTP process needs to know; picklable."""

    info: dict[str, Any]  # what /server_info answers, but for the group
    report: MemberReport  # of this rank
    leader_url: str  # "" on rank 0
    secret: bytes


def serve(listener: socket.socket, board: Board, options: HttpOptions) -> None:
    """Entry point of the process; returns when it is told to terminate."""
    die_with_parent()
    logging.basicConfig(format="[%(asctime)s] %(message)s", level=logging.INFO)
    asyncio.run(_serve(listener, board, options))


async def _serve(listener: socket.socket, board: Board, options: HttpOptions) -> None:
    runner = web.AppRunner(build_app(board, options), access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    renewal = asyncio.create_task(_keep_reporting(options)) if options.leader_url else None
    await stop.wait()
    if renewal is not None:
        renewal.cancel()
    await runner.cleanup()


def build_app(board: Board, options: HttpOptions) -> web.Application:
    """The routes of one rank."""
    endpoints = _Endpoints(board, options)
    app = web.Application(client_max_size=64 * 1024)
    app.add_routes(
        [
            web.get("/health", endpoints.health),
            web.get("/metrics", endpoints.metrics),
            web.get("/server_info", endpoints.server_info),
            web.get("/get_server_info", endpoints.server_info),
            web.get(STATUS_PATH, endpoints.status),
            web.post(MEMBERS_PATH, endpoints.members),
        ]
    )
    return app


class _Endpoints:
    def __init__(self, board: Board, options: HttpOptions) -> None:
        self._board = board
        self._options = options
        self._group = None if options.leader_url else Group(options.report)

    async def health(self, request: web.Request) -> web.Response:
        is_well, reason = self._condition()
        body = {"healthy": is_well, "reason": reason, "loop_age_s": round(self._board.age_s(), 3)}
        return web.json_response(body, status=200 if is_well else 503)

    async def status(self, request: web.Request) -> web.Response:
        is_well, reason = self._condition()
        body = {"role": "mlp", "state": "ready" if is_well else "stalled", "reason": reason}
        return web.json_response(body | {"attached_peers": self._board.read()[Counter.PEERS]})

    async def metrics(self, request: web.Request) -> web.Response:
        report, info = self._options.report, self._options.info
        text = render(self._board, rank=report.rank, first_expert=info["first_expert"])
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def server_info(self, request: web.Request) -> web.Response:
        info = dict(self._options.info)
        if self._group is not None:
            info["group"] = [
                {"rank": member.rank, "exchange_address": member.exchange_address}
                for member in self._group.members()
            ]
            info["missing_ranks"] = self._group.missing()
        return web.json_response(info)

    async def members(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            self._accept(body, request.headers.get(PROOF_HEADER, ""), request.remote or "")
        except (ConfigError, msgspec.MsgspecError) as error:
            logger.warning("refused a member report from %s: %s", request.remote, error)
            return web.json_response({"error": str(error)}, status=409)
        return web.json_response({"ok": True})

    def _accept(self, body: bytes, proof: str, remote: str) -> None:
        if self._group is None:
            raise ConfigError("this is not rank 0; give --afd-leader the address of rank 0")
        if not self._options.secret and not auth.is_loopback(remote):
            raise ConfigError("members from other hosts need the same --afd-secret-file")
        expected = auth.prove(self._options.secret, "member", body).hex()
        if not hmac.compare_digest(proof.encode(errors="replace"), expected.encode()):
            raise ConfigError("the member's secret is not rank 0's; use the same --afd-secret-file")
        report = msgspec.json.decode(body, type=MemberReport)
        if abs(time.time() - report.sent_at_s) > MAX_SKEW_S:
            raise ConfigError(f"the report is older than {MAX_SKEW_S:g} s; are the clocks set?")
        address = replace_wildcard(report.exchange_address, remote)
        self._group.report(msgspec.structs.replace(report, exchange_address=address))

    def _condition(self) -> tuple[bool, str]:
        age_s = self._board.age_s()
        if self._board.read()[Counter.STATE] != State.SERVING:
            return False, "not serving"
        if age_s > LOOP_AGE_LIMIT_S:
            return False, f"the loop last turned {age_s:.0f} s ago"
        return True, ""


async def _keep_reporting(options: HttpOptions) -> None:
    url = options.leader_url.rstrip("/") + MEMBERS_PATH
    said = ""
    timeout = aiohttp.ClientTimeout(total=RENEW_S * 2)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            answer = await _report(session, url, options)
            if answer != said:
                logger.info("report to rank 0 at %s: %s", options.leader_url, answer)
                said = answer
            await asyncio.sleep(RENEW_S)


async def _report(session: aiohttp.ClientSession, url: str, options: HttpOptions) -> str:
    body = msgspec.json.encode(msgspec.structs.replace(options.report, sent_at_s=time.time()))
    proof = auth.prove(options.secret, "member", body).hex()
    try:
        async with session.post(url, data=body, headers={PROOF_HEADER: proof}) as response:
            if response.status == 200:
                return "accepted"
            return f"refused: {await response.text()}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"not reached yet: {error}"
