"""GET /v1/models where several models are served: what a server of each says, in one list."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp
import msgspec
from aiohttp import web

from sgl_router_afd.api.answers import json_answer
from sgl_router_afd.api.shapes import ModelCard, ModelsAnswer
from sgl_router_afd.control.groups import View
from sgl_router_afd.control.registry import Entry
from sgl_router_afd.fleet import Fleet
from sgl_router_afd.upstream_session import read_at_most

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 2.0
MAX_LIST_BYTES = 1024 * 1024
FORWARDED = ("Authorization", "X-Request-Id")
SESSION: web.AppKey[aiohttp.ClientSession] = web.AppKey("models", aiohttp.ClientSession)


class ModelDesk:
    """Merges the servers' lists.

    Args:
        fleet: Has the servers.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def models(self, request: web.Request) -> web.Response:
        """One server of each set of names is asked; a name that none tells of is listed anyway."""
        session = request.app[SESSION]
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        asked = [_ask(session, entry, headers) for entry in self._one_of_each()]
        cards = {card.id: card for told in await asyncio.gather(*asked) for card in told}
        names = dict.fromkeys(name for view in self._views() for name in view.models)
        data = tuple(cards.get(name) or _own_card(name) for name in names)
        return json_answer(ModelsAnswer(object="list", data=data))

    def _views(self) -> list[View]:
        return list(self._fleet.plane.groups.views.values())

    def _one_of_each(self) -> list[Entry]:
        chosen: dict[tuple[str, ...], Entry] = {}
        for view in self._views():
            for entry in [*view.with_traffic(), *view.group.attn]:
                chosen.setdefault(entry.registration.models, entry)
        return list(chosen.values())


async def session_of(app: web.Application) -> AsyncIterator[None]:
    """A cleanup context: the connections to servers live as long as the application."""
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        app[SESSION] = session
        yield


async def _ask(
    session: aiohttp.ClientSession, entry: Entry, headers: dict[str, str]
) -> tuple[ModelCard, ...]:
    url = f"{entry.registration.url}/v1/models"
    try:
        async with session.get(url, headers=headers, allow_redirects=False) as answer:
            answer.raise_for_status()
            body = await read_at_most(answer, MAX_LIST_BYTES)
        return msgspec.json.decode(body, type=ModelsAnswer).data
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.warning("%s did not tell its models: %s", url, error or type(error).__name__)
        return ()


def _own_card(name: str) -> ModelCard:
    return ModelCard(id=name, object="model", created=0, owned_by="sglang", root=name)
