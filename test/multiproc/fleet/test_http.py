"""The launcher's HTTP side against real servers: readiness and streamed answers."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from sglang_afd.errors import AfdError
from sglang_afd.fleet.chat import CHAT_PATH, MODELS_PATH, chat_body, served_model, stream_chat
from sglang_afd.fleet.console import Console
from sglang_afd.fleet.probe import wait_until_ready
from sglang_afd.fleet.spec import ServerSpec

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(path: str, handler: Handler) -> AsyncIterator[str]:
    """A server with one endpoint; yields its base address."""
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://127.0.0.1:{1}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


def answering(*events: bytes, http_status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=http_status)
        await response.prepare(request)
        for event in events:
            await response.write(event)
        return response

    return handler


def ask(handler: Handler) -> str:
    async def run() -> str:
        async with serving(CHAT_PATH, handler) as url, aiohttp.ClientSession() as session:
            return "".join(
                [text async for text in stream_chat(session, url, chat_body("m", "hi", 4))]
            )

    return asyncio.run(run())


def delta(text: str) -> bytes:
    return b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % text.encode()


def test_an_answer_arrives_in_pieces() -> None:
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": null}}]}\n\n'
    usage = b'data: {"choices": [], "usage": {}}\n\n'

    answer = ask(answering(role, delta("Par"), b": ping\n\n", delta("is"), usage, b"data: [DONE]"))

    assert answer == "Paris"


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (answering(b"no template", http_status=400), "answered 400: no template"),
        (answering(delta("Par")), r"ended without \[DONE\]"),
        (answering(b'data: {"error": {"message": "lost"}}\n\n'), "ended in an error: .*lost"),
    ],
)
def test_an_answer_that_is_none_is_an_error(handler: Handler, message: str) -> None:
    with pytest.raises(AfdError, match=message):
        ask(handler)


def name_of(*answers: tuple[int, str], timeout_s: float = 20.0) -> str:
    """What the launcher calls the model of a router that answers so, the last again and again."""
    left = [*answers]

    async def models(_: web.Request) -> web.Response:
        status, text = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, text=text)

    async def run() -> str:
        async with serving(MODELS_PATH, models) as url, aiohttp.ClientSession() as session:
            return await served_model(session, url, timeout_s=timeout_s)

    return asyncio.run(run())


MODELS = '{"object":"list","data":[{"id":"qwen3","object":"model"},{"id":"other"}]}'


def test_the_model_is_called_as_the_router_lists_it_once_it_does() -> None:
    assert name_of((503, "{}"), (200, '{"data":[]}'), (200, "<html>"), (200, MODELS)) == "qwen3"


def test_a_list_that_needs_a_key_leaves_the_model_without_a_name() -> None:
    assert name_of((401, "no key")) == "default"


def test_a_list_that_stays_empty_is_an_error_with_what_was_answered() -> None:
    with pytest.raises(AfdError, match=r'lists no model after 0 s: it answered 200: {"data":\[\]}'):
        name_of((200, '{"data":[]}'), timeout_s=0.0)


def test_a_request_says_the_name_of_the_model() -> None:
    assert chat_body("qwen3", "hi", 4)["model"] == "qwen3"


def test_the_wait_ends_when_the_server_says_ready() -> None:
    states = iter(["starting", "detached", "ready"])
    log = io.StringIO()

    async def status(_: web.Request) -> web.Response:
        return web.json_response({"state": next(states)})

    async def run() -> None:
        async with serving("/status", status) as url, aiohttp.ClientSession() as session:
            server = ServerSpec(name="attn-0", argv=(), status_url=f"{url}/status")
            await wait_until_ready([server], session, Console(quiet=True, log=log))

    asyncio.run(run())

    assert next(states, None) is None
    assert log.getvalue().startswith("attn-0: ready after ")


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    async def run() -> None:
        server = ServerSpec(name="attn-0", argv=(), status_url="http://127.0.0.1:1/status")
        async with aiohttp.ClientSession() as session:
            waiting = wait_until_ready([server], session, Console(quiet=True, log=io.StringIO()))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, timeout=0.6)

    asyncio.run(run())
