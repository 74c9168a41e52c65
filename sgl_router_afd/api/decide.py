"""GET and POST /afd/v1/route: which server a request should go to, for those who relay themselves.

Whoever asks sends the request there at once, so a decision counts as load until the server's next
report tells of it. Else all requests between two reports would go to the same server.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import assert_never

import msgspec
from aiohttp import web

from sgl_router_afd.api.answers import ApiError, decode, json_answer, read_body
from sgl_router_afd.api.shapes import Decision
from sgl_router_afd.control.policy import POLICIES, Candidate
from sgl_router_afd.control.prefix import prefix_key
from sgl_router_afd.control.routing import Candidates, Hold, NoRoute
from sgl_router_afd.fleet import Fleet

MAX_ROUTE_BODY_BYTES = 4 * 1024 * 1024


class _Named(msgspec.Struct, frozen=True):
    model: str | None = None


class Decider:
    """Chooses as the relay does, with the same policy.

    Args:
        fleet: Has the servers.
        policy: A key of `control.policy.POLICIES`.
        rng: For the policies that draw.
    """

    def __init__(self, fleet: Fleet, policy: str, rng: random.Random | None = None) -> None:
        self._fleet = fleet
        self._policy = POLICIES[policy]
        self._rng = rng or random.Random()
        self._last_id = ""
        self._sent: dict[str, tuple[str, int, int]] = {}  # boot id and seq of a report, decisions

    async def of_model(self, request: web.Request) -> web.Response:
        """For a request of which only the model is known."""
        return json_answer(self.decide(request.query.get("model"), b""))

    async def of_body(self, request: web.Request) -> web.Response:
        """For a request whose body is sent here."""
        body = await read_body(request, MAX_ROUTE_BODY_BYTES)
        model = request.query.get("model")
        if model is None:
            model = decode(body, _Named).model
        return json_answer(self.decide(model, prefix_key(body)))

    def decide(self, model: str | None, key: bytes) -> Decision:
        """Choose a server.

        Raises:
            ApiError: There is none: 404 for a model that nobody serves, 503 else.
        """
        found = self._fleet.plane.route(model)
        match found:
            case Hold():
                raise ApiError(503, found.reason)
            case NoRoute():
                raise ApiError(found.http_status, found.reason)
            case Candidates():
                return self._choose(sorted(found.server_ids), key)
        assert_never(found)

    def _choose(self, server_ids: list[str], key: bytes) -> Decision:
        first = bisect_right(server_ids, self._last_id)
        num = len(server_ids)
        candidates = [
            self._candidate(server_id, (index - first) % num)
            for index, server_id in enumerate(server_ids)
        ]
        chosen = self._policy(candidates, key, self._rng).server_id
        self._last_id = chosen
        return self._send(chosen)

    def _candidate(self, server_id: str, turns_away: int) -> Candidate:
        entry = self._fleet.plane.registry.get(server_id)
        assert entry is not None, f"{server_id} is a candidate and not registered"
        load, capacity = entry.report.load, entry.registration.capacity
        return Candidate(
            server_id=server_id,
            num_reported=load.num_running + load.num_waiting,
            num_in_flight_then=entry.num_in_flight_then,
            num_in_flight=self._fleet.traffic(server_id).num_in_flight + self._num_sent(server_id),
            max_running=capacity.max_running_requests,
            free_kv_tokens=load.free_kv_tokens,
            kv_tokens=capacity.kv_tokens,
            turns_away=turns_away,
        )

    def _send(self, server_id: str) -> Decision:
        plane = self._fleet.plane
        entry, view = plane.registry.get(server_id), plane.groups.of(server_id)
        assert entry is not None and view is not None, f"{server_id} was chosen and is not placed"
        num_sent = self._num_sent(server_id) + 1
        self._sent = {
            known: sent for known, sent in self._sent.items() if plane.registry.get(known)
        }
        self._sent[server_id] = (entry.boot_id, entry.report.seq, num_sent)
        return Decision(
            server_id=server_id, url=entry.registration.url, group=view.name, epoch=view.epoch
        )

    def _num_sent(self, server_id: str) -> int:
        entry = self._fleet.plane.registry.get(server_id)
        boot_id, seq, num = self._sent.get(server_id, ("", 0, 0))
        is_of_now = entry is not None and (boot_id, seq) == (entry.boot_id, entry.report.seq)
        return num if is_of_now else 0
