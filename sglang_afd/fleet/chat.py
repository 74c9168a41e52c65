"""A streamed chat completion, as any OpenAI client would ask for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from sglang_afd.errors import AfdError

CHAT_PATH = "/v1/chat/completions"
EVENT_PREFIX = b"data:"


def chat_body(prompt: str, max_tokens: int) -> dict[str, Any]:
    """The request: one user message, greedy, streamed."""
    return {
        "model": "default",
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
