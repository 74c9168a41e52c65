"""POST /afd/v1/servers: a server registers, renews its lease, or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import assert_never

from aiohttp import web

from sgl_router_afd.api.answers import JSON, ApiError, read_body
from sgl_router_afd.fleet import Fleet
from sgl_router_afd.keys import Key
from sglang_afd.errors import ProtocolError, Refused
from sglang_afd.protocol.auth import is_loopback
from sglang_afd.protocol.registration import (
    MAX_MESSAGE_BYTES,
    Decline,
    DeclineCode,
    Lease,
    Leave,
    Registration,
    Renewal,
    ToRouter,
    decode_to_router,
    encode,
)
from sglang_afd.protocol.signature import MAX_SKEW_S, SIGNATURE_HEADER, is_signed


class RegistrationDesk:
    """Takes the messages of servers.

    Args:
        fleet: Gets them.
        secret: What servers sign with; empty if there is none.
        host: What the router listens on; without a secret only a loopback address will do.
        wall_clock: time.time, which servers stamp their messages with.
    """

    def __init__(
        self, fleet: Fleet, secret: Key, host: str, wall_clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._secret = secret
        self._host = host
        self._wall_clock = wall_clock

    async def take(self, request: web.Request) -> web.Response:
        """Answer with a lease, with nothing to a server that leaves, or decline."""
        body = await read_body(request, MAX_MESSAGE_BYTES)
        self._check_signature(body, request.headers.get(SIGNATURE_HEADER))
        try:
            message = decode_to_router(body)
            self._check_age(message)
            lease = await self._apply(message)
        except ProtocolError as error:
            raise ApiError(400, str(error)) from None
        except Refused as refusal:
            decline = Decline(code=DeclineCode(refusal.code), message=str(refusal)[:2000])
            return web.Response(body=encode(decline), status=409, content_type=JSON)
        if lease is None:
            return web.Response(status=204)
        return web.Response(body=encode(lease), content_type=JSON)

    async def _apply(self, message: ToRouter) -> Lease | None:
        plane, now_s = self._fleet.plane, self._fleet.now_s()
        match message:
            case Registration():
                entry = plane.register(message, now_s)
            case Renewal():
                entry = plane.renew(message, now_s)
            case Leave():
                plane.leave(message, now_s)
                self._fleet.changed()
                return None
            case _:
                assert_never(message)
        await self._decided()
        return plane.lease(entry)

    async def _decided(self) -> None:
        decided = asyncio.Event()
        self._fleet.when_decided(decided.set)
        await decided.wait()

    def _check_signature(self, body: bytes, value: str | None) -> None:
        if not self._secret:
            self._check_is_local()
            return
        if value is None:
            raise ApiError(
                403,
                f"the message has no {SIGNATURE_HEADER}, and this router has a secret; start the "
                "server with the router's --afd-secret-file",
            )
        if not is_signed(self._secret.value, body, value):
            raise ApiError(
                403,
                f"{SIGNATURE_HEADER} was made with another secret, or the message was changed on "
                "its way; give the server and the router the same --afd-secret-file",
            )

    def _check_is_local(self) -> None:
        """Whoever registers gets the clients' prompts."""
        if not is_loopback(self._host):
            raise ApiError(
                403,
                f"this router listens on {self._host} and has no secret, so no server can "
                "register; start it and its servers with the same --afd-secret-file FILE, name "
                "the servers with --attn and --mlp, or start the router with --host 127.0.0.1",
            )

    def _check_age(self, message: ToRouter) -> None:
        """A signature proves nothing of a message that somebody plays back."""
        skew_s = message.sent_at_s - self._wall_clock()
        if self._secret and abs(skew_s) > MAX_SKEW_S:
            word = "behind" if skew_s < 0 else "ahead of"
            raise ApiError(
                403,
                f"the message was sent {abs(skew_s):.0f} s {word} this router's clock, and "
                f"{MAX_SKEW_S:.0f} s are allowed; set the clocks of both hosts",
            )
