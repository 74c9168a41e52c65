"""Carries one request to an attention server and its answer back, byte for byte."""

from __future__ import annotations

import asyncio
import io
import logging

import aiohttp
from aiohttp import web
from yarl import URL

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.headers import request_headers, response_headers
from sgl_router_afd.pool import Server, ServerPool
from sgl_router_afd.replies import error_event, error_reply
from sgl_router_afd.upstream_session import describe

logger = logging.getLogger(__name__)

# Nothing was sent when one of these is raised, so another server may be asked.
NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class Relay:
    """The handler behind every relayed endpoint.

    A client that goes away cancels the handler (`handler_cancellation` of the runner), whether or
    not the answer has begun; that closes the connection to the server, upon which SGLang aborts.
    """

    def __init__(
        self, config: RouterConfig, pool: ServerPool, session: aiohttp.ClientSession
    ) -> None:
        self._max_body_bytes = config.max_body_bytes
        self._pool = pool
        self._session = session
        self._running: set[asyncio.Task[None]] = set()
        self._is_draining = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self._is_draining:
            return error_reply(503, "this router is shutting down; send the request to another")
        task = asyncio.current_task()
        assert task is not None, "aiohttp runs every handler in a task"
        self._running.add(task)
        try:
            return await self._relay(request, await self._read_body(request))
        finally:
            self._running.discard(task)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let the running ones finish, cut those that take longer."""
        self._is_draining = True
        running = set(self._running)
        if running:
            logger.info("waiting up to %g s for %d running requests", timeout_s, len(running))
            _, late = await asyncio.wait(running, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                logger.warning("cut %d requests that were still running", len(late))
                await asyncio.wait(late)

    async def _read_body(self, request: web.Request) -> bytes:
        if (request.content_length or 0) > self._max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_body_bytes)
        return await request.read()

    async def _relay(self, request: web.Request, body: bytes) -> web.StreamResponse:
        tried: set[str] = set()
        while (server := self._pool.pick(excluding=tried)) is not None:
            tried.add(server.url)
            with self._pool.lease(server):
                try:
                    answer = await self._send(server, request, body)
                except NOT_CONNECTED as error:
                    self._pool.record_unreachable(server, describe(error))
                    continue
                except aiohttp.ClientError as error:
                    return error_reply(502, _broken(server, "before it answered", error))
                try:
                    return await self._answer(server, request, answer)
                finally:
                    answer.close()
        return error_reply(
            503,
            f"no attention server is ready: {self._pool.explain()}. Try again shortly; if this "
            "lasts, do what the reasons say, or read the servers' logs",
        )

    async def _send(
        self, server: Server, request: web.Request, body: bytes
    ) -> aiohttp.ClientResponse:
        return await self._session.request(
            request.method,
            URL(server.url + request.rel_url.raw_path_qs, encoded=True),
            headers=request_headers(request.headers),
            data=io.BytesIO(body) if body else None,
            allow_redirects=False,
        )

    async def _answer(
        self, server: Server, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=answer.status, reason=answer.reason, headers=response_headers(answer.headers)
        )
        try:
            await response.prepare(request)
            await self._copy(server, answer, request, response)
        except aiohttp.ClientConnectionResetError:
            logger.debug("the client of %s left", request.path)
        return response

    async def _copy(
        self,
        server: Server,
        answer: aiohttp.ClientResponse,
        request: web.Request,
        response: web.StreamResponse,
    ) -> None:
        while True:
            try:
                chunk = await answer.content.readany()
            except aiohttp.ClientError as error:
                await _end_broken(request, response, _broken(server, "inside its answer", error))
                return
            if not chunk:
                self._pool.record_served(server)
                return
            await response.write(chunk)


def _broken(server: Server, when: str, error: Exception) -> str:
    message = (
        f"attention server {server.url} closed the connection {when} ({describe(error)}); the "
        "request may have run in part, so it was not sent to another server: send it again"
    )
    logger.warning("%s", message)
    return message


async def _end_broken(request: web.Request, response: web.StreamResponse, message: str) -> None:
    """End a response whose source died so that no client can take it for a whole one."""
    takes_an_event = (
        response.content_type == "text/event-stream"
        and response.content_length is None
        and "Content-Encoding" not in response.headers
    )
    if takes_an_event:
        await response.write(error_event(502, message))
    elif request.transport is not None:
        request.transport.close()
