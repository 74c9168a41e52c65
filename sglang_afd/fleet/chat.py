"""A streamed chat completion, as any OpenAI client would ask for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from sglang_afd.errors import AfdError

CHAT_PATH = "/v1/chat/completions"
MODELS_PATH = "/v1/models"
NO_NAME = "default"  # SGLang's own word for a model that the client does not name
LIST_S = 30.0  # for a gateway to hear of servers that are ready
LIST_AGAIN_S = 0.1
LIST_TIMEOUT = aiohttp.ClientTimeout(total=10.0)  # of one question
EVENT_PREFIX = b"data:"


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


async def served_model(
    session: aiohttp.ClientSession, url: str, *, timeout_s: float = LIST_S
) -> str:
    """The name that requests give for the model; the first where there are several.

    Args:
        session: What to ask with.
        url: Base address of a server or router.
        timeout_s: How long its list may be empty, or an error.
    Returns: "default" where the list needs a key; a router without a gateway knows what that means.
    Raises: AfdError when no model is listed in time.
    """
    give_up_s = time.monotonic() + timeout_s
    while True:
        try:
            async with session.get(url + MODELS_PATH, timeout=LIST_TIMEOUT) as response:
                if response.status in (401, 403):
                    return NO_NAME
                text = await response.text()
                said = f"it answered {response.status}: {text}"
                if response.status == 200 and (cards := _cards(text)):
                    return cards[0].id
        except (aiohttp.ClientError, TimeoutError) as error:
            said = str(error) or "it does not answer"
        if time.monotonic() > give_up_s:
            raise AfdError(f"{url}{MODELS_PATH} lists no model after {timeout_s:g} s: {said}")
        await asyncio.sleep(LIST_AGAIN_S)


def _cards(text: str) -> list[_Card]:
    """Empty where it is something else than a list of models."""
    try:
        return msgspec.json.decode(text, type=_Models).data
    except msgspec.MsgspecError:
        return []


def chat_body(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """The request: one user message, greedy, streamed."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }


async def stream_chat(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[str]:
    """The pieces of the answer, as they arrive.

    Args:
        session: What to send it with.
        url: Base address of a server or router.
        body: As of chat_body.
    Raises: AfdError when the answer is an error, is none, or breaks off.
    """
    try:
        async with session.post(url + CHAT_PATH, json=body) as response:
            if response.status != 200:
                raise AfdError(f"{url} answered {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(EVENT_PREFIX):
                    continue
                data = line.removeprefix(EVENT_PREFIX).strip()
                if data == b"[DONE]":
                    return
                yield _text_of(msgspec.json.decode(data))
    except aiohttp.ClientError as error:
        raise AfdError(f"the answer of {url} broke off: {error}") from error
    raise AfdError(f"the answer of {url} ended without [DONE]")


def _text_of(event: dict[str, Any]) -> str:
    if "error" in event:
        raise AfdError(f"the answer ended in an error: {event['error']}")
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
