"""Polls of static servers over real connections."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from one_answer import answering

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.polling import polling
from sgl_router_afd.static_servers import StaticServer
from sgl_router_afd.upstream_session import describe, open_session
from sglang_afd.config import Role
from sglang_afd.protocol.registration import MAX_MESSAGE_BYTES


class Heard:
    """Takes the place of the static servers, and keeps what came of the first poll."""

    def __init__(self, url: str) -> None:
        self.static = StaticServer(url=url, role=Role.ATTN)
        self.news: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

    def all(self) -> tuple[StaticServer, ...]:
        return (self.static,)

    def on_urls(self, call: object) -> None:
        pass

    def on_answer(self, static: StaticServer, http_status: int, body: bytes) -> None:
        self._hear("answer", f"{http_status} {body.decode()}")

    def on_refusal(self, static: StaticServer, reason: str) -> None:
        self._hear("refusal", reason)

    def on_silence(self, static: StaticServer, reason: str) -> None:
        self._hear("silence", reason)

    def _hear(self, what: str, detail: str) -> None:
        if not self.news.done():
            self.news.set_result((what, detail))


async def polled(url: str) -> tuple[str, str]:
    config = RouterConfig(attn_urls=(url,), status_timeout_s=5.0)
    heard = Heard(url)
    async with open_session(config) as session, polling(heard, session, config):  # type: ignore[arg-type]
        return await heard.news


async def polled_at_a_server_that_sends(sent: bytes) -> tuple[str, str]:
    async with answering(sent) as server:
        return await polled(server.url)


def test_an_answer_is_handed_on_with_its_status() -> None:
    sent = b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nsoon"

    assert asyncio.run(polled_at_a_server_that_sends(sent)) == ("answer", "503 soon")


def test_a_refused_connection_is_a_refusal() -> None:
    with socket.socket() as bound:  # and nobody listens
        bound.bind(("127.0.0.1", 0))
        news = asyncio.run(polled(f"http://127.0.0.1:{bound.getsockname()[1]}"))

    assert news == ("refusal", "connection refused")


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b"?"])
def test_an_answer_that_breaks_off_takes_no_requests_away(sent: bytes) -> None:
    what, _ = asyncio.run(polled_at_a_server_that_sends(sent))

    assert what == "silence"


def test_of_an_answer_that_never_ends_no_more_is_read_than_a_registration_can_have() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n"

    what, why = asyncio.run(polled_at_a_server_that_sends(head + bytes(MAX_MESSAGE_BYTES + 1)))

    assert (what, why) == ("silence", f"its answer is longer than {MAX_MESSAGE_BYTES} bytes")


def test_a_name_without_an_address_is_told_in_words() -> None:
    key = aiohttp.client_reqrep.ConnectionKey("gone", 1, False, True, None, None, None)
    told = socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    error = aiohttp.ClientConnectorDNSError(key, told)

    assert describe(error) == "no address of gone: name or service not known"
