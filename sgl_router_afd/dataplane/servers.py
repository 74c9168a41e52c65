"""The servers as one relay process knows them, and which of them gets a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from http import HTTPStatus

from sgl_router_afd.control.policy import Candidate, Policy
from sgl_router_afd.control.standing import Standing
from sgl_router_afd.dataplane.body import NO_NAME
from sgl_router_afd.dataplane.counters import IN_FLIGHT, SharedCounters
from sgl_router_afd.dataplane.messages import NO_TABLE, ModelRow, ServerRow, Table
from sgl_router_afd.dataplane.server import Server


class Route:
    """What a table says of one model, worked out once for all requests that come under it."""

    __slots__ = ("candidates", "http_status", "may_wait", "reason", "servers")

    def __init__(self, row: ModelRow, servers: Sequence[Server]) -> None:
        self.servers = [server for server in servers if not server.is_out]
        self.candidates = [server.candidate for server in self.servers]
        # When all are out for the moment, the next table says what became of them.
        self.may_wait = not self.servers and (row.may_wait or bool(servers))
        self.http_status = row.http_status
        self.reason = row.reason

    @property
    def is_of_nobody(self) -> bool:
        """No server has the model, nor will by itself."""
        return self.http_status == HTTPStatus.NOT_FOUND and not self.servers and not self.may_wait

    def has_other(self, tried: Collection[int]) -> bool:
        """Whether a request that was sent to `tried` in vain can go to another server now."""
        return any(server.slot not in tried for server in self.servers)


class Servers:
    """Follows the tables of the control process.

    Args:
        policy: Chooses among those that may get a request.
        counters: Of all relay processes.
        open_server: Makes the server of a row.
        on_news: Called when requests that wait may have somewhere to go, or nothing to hope for.
    """

    def __init__(
        self,
        policy: Policy,
        counters: SharedCounters,
        open_server: Callable[[ServerRow], Server],
        on_news: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._counters = counters
        self._open_server = open_server
        self._on_news = on_news
        self._table = NO_TABLE
        self._servers: dict[int, Server] = {}
        self._by_id: dict[str, Server] = {}
        self._left: list[Server] = []  # no longer in the table, and not done with their requests
        self._routes: dict[str | None, Route] = {}
        self._unknown = Route(NO_TABLE.unknown, ())
        self._num_slots = 0
        self._rng = random.Random()

    @property
    def models(self) -> Collection[str]:
        """The names that requests may say."""
        return self._table.models.keys()

    @property
    def is_one_model_served(self) -> bool:
        """Whether any server's list of models is the router's."""
        return len(self._table.models) == 1 and bool(self._table.unnamed.slots)

    @property
    def needs_names(self) -> bool:
        """Whether a request that names no model cannot be served."""
        return self._table.unnamed.http_status == HTTPStatus.BAD_REQUEST

    def take(self, table: Table) -> None:
        """Replace what was known before."""
        was_out = any(server.is_out for server in self._servers.values())
        servers = {row.slot: self._server_of(row) for row in table.rows}
        for slot, server in self._servers.items():
            if servers.get(slot) is not server:
                server.close_idle()
                self._left.append(server)
        is_news = was_out or _routes_of(table) != _routes_of(self._table)
        self._table, self._servers = table, servers
        self._by_id = {server.candidate.server_id: server for server in servers.values()}
        self._num_slots = 1 + max(servers, default=-1)
        self._sort_out()
        if is_news:
            self._on_news()
        self._take_back()

    def route(self, model: str | None) -> Route:
        """Where requests for a model go; None is that of a request that names none."""
        return self._routes.get(model, self._unknown)

    def mark_unreachable(self, server: Server) -> None:
        """It gets no request until the next table."""
        server.is_out = True
        self._sort_out()

    def pick(
        self, route: Route, *, key: bytes = b"", excluding: Collection[int] = ()
    ) -> Server | None:
        """The server that gets a request, or None; slots in `excluding` are left out.

        Args:
            route: Of the request's model.
            key: Of its beginning; b"" for none.
            excluding: Where it was in vain.
        """
        servers, candidates = route.servers, route.candidates
        if excluding:
            servers = [server for server in servers if server.slot not in excluding]
            candidates = [server.candidate for server in servers]
        if not servers:
            return None
        chosen = servers[0]
        if len(servers) > 1:
            in_flight = self._counters.totals(IN_FLIGHT, self._num_slots)
            turns = self._counters.turns
            for server in servers:
                candidate, slot = server.candidate, server.slot
                candidate.num_in_flight = in_flight[slot]
                candidate.turns_away = turns[slot]
            chosen = self._by_id[self._policy(candidates, key, self._rng).server_id]
        self._counters.take_turn(chosen.slot)
        return chosen

    def close_idle(self, idle_s: float) -> None:
        for server in self._servers.values():
            server.close_idle(idle_s)

    def _server_of(self, row: ServerRow) -> Server:
        server = self._servers.get(row.slot)
        if server is None or server.url != row.url or server.candidate.server_id != row.server_id:
            server = self._open_server(row)
        server.candidate = candidate_of(row)
        server.is_out = False
        return server

    def _sort_out(self) -> None:
        table = self._table
        unnamed = self._route_of(table.unnamed)
        self._routes = {None: unnamed, NO_NAME: unnamed}
        self._routes.update({name: self._route_of(row) for name, row in table.models.items()})
        self._unknown = self._route_of(table.unknown)

    def _route_of(self, row: ModelRow) -> Route:
        return Route(row, [self._servers[slot] for slot in row.slots])

    def _take_back(self) -> None:
        """Requests without an answer leave servers that are in trouble, if they have elsewhere."""
        self._left = [server for server in self._left if server.exchanges]
        degraded: Iterable[Server] = [
            self._servers[row.slot] for row in self._table.rows if row.state == Standing.DEGRADED
        ]
        for server in (*self._left, *degraded):
            for exchange in list(server.exchanges):
                exchange.on_server_degraded(server)


def candidate_of(row: ServerRow) -> Candidate:
    """As the policies see a server; its numbers of now are filled in at each choice."""
    return Candidate(
        server_id=row.server_id,
        num_reported=row.num_reported,
        num_in_flight_then=row.num_in_flight_then,
        num_in_flight=0,
        max_running=row.max_running,
        free_kv_tokens=row.free_kv_tokens,
        kv_tokens=row.kv_tokens,
        turns_away=0,
    )


def _routes_of(table: Table) -> object:
    return table.models, table.unnamed, table.unknown
