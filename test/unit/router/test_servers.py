from __future__ import annotations

from typing import Any

import pytest

from sgl_router_afd.control.policy import POLICIES
from sgl_router_afd.control.standing import Standing
from sgl_router_afd.dataplane.counters import IN_FLIGHT, RelayCounters, SharedCounters
from sgl_router_afd.dataplane.messages import ModelRow, ServerRow, Table
from sgl_router_afd.dataplane.reading import ReadBuffer
from sgl_router_afd.dataplane.server import Server
from sgl_router_afd.dataplane.servers import Servers

NOBODY = ModelRow(slots=(), http_status=404)


class Known:
    """Servers a, b, c ... of one model m, and the counters of two relay processes."""

    def __init__(self, num: int = 3, *, policy: str = "least_load", **models: ModelRow) -> None:
        self.shared = SharedCounters.create(2)
        self.relays = [RelayCounters(self.shared, relay) for relay in range(2)]
        self.num_news = 0
        self.servers = Servers(POLICIES[policy], self.shared, _server, self._hear)
        self.take(num, **models)

    def take(
        self, num: int = 3, *, load: dict[int, dict[str, Any]] | None = None, **models: ModelRow
    ) -> None:
        """Take a table with so many servers; all serve m unless `models` says who does."""
        rows = [_row(slot, **(load or {}).get(slot, {})) for slot in range(num)]
        models = models or {"m": ModelRow(slots=tuple(range(num)))}
        unnamed = models.get("m", NOBODY)
        self.servers.take(Table(rows=tuple(rows), models=models, unnamed=unnamed, unknown=NOBODY))

    def picks(
        self,
        num: int,
        *,
        model: str | None = "m",
        excluding: tuple[int, ...] = (),
        key: bytes = b"",
    ) -> str:
        route = self.servers.route(model)
        chosen = [self.servers.pick(route, excluding=excluding, key=key) for _ in range(num)]
        return "".join(server.url if server else "-" for server in chosen)

    def burst(self, num: int) -> str:
        """The same for requests that stay."""
        urls = ""
        for _ in range(num):
            urls += self.picks(1)
            self.relays[0].add(IN_FLIGHT + "abcdef".index(urls[-1]))
        return urls

    def _hear(self) -> None:
        self.num_news += 1


def _row(slot: int, url: str = "", state: str = Standing.SERVING, **load: Any) -> ServerRow:
    return ServerRow(
        slot=slot, server_id=f"s{slot}", url=url or "abcdef"[slot], state=state, reason="", **load
    )


def _server(row: ServerRow) -> Server:
    return Server(row.url, row.slot, ReadBuffer(1), connect_timeout_s=1.0)


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_equal_servers_take_turns(policy: str) -> None:
    assert Known(policy=policy).picks(7) == "abcabca"


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_turns_skip_servers_that_are_excluded(policy: str) -> None:
    assert Known(policy=policy).picks(4, excluding=(1,)) == "acac"


def test_two_relay_processes_take_turns_together() -> None:
    one = Known()
    two = Servers(POLICIES["round_robin"], one.shared, _server, lambda: None)
    every = ModelRow(slots=(0, 1, 2))
    two.take(
        Table(rows=tuple(map(_row, range(3))), models={"m": every}, unnamed=every, unknown=NOBODY)
    )

    chosen = [servers.pick(servers.route("m")) for servers in (one.servers, two, one.servers, two)]

    assert [server.url for server in chosen if server] == ["a", "b", "c", "a"]


def test_the_turns_of_one_model_do_not_disturb_those_of_another() -> None:
    known = Known(4, policy="round_robin", m=ModelRow(slots=(0, 1)), n=ModelRow(slots=(2, 3)))

    picks = "".join(known.picks(1, model=model) for model in "mnmnmmnn")

    assert picks == "acbdabcd"


def test_least_load_counts_what_is_in_flight_over_all_relay_processes() -> None:
    known = Known()
    one, two = known.relays
    for relay, slot in ((one, 0), (two, 0), (one, 1), (two, 1), (two, 2)):
        relay.add(IN_FLIGHT + slot)

    assert known.picks(3) == "ccc"

    one.add(IN_FLIGHT + 2)
    assert sorted(known.picks(3)) == ["a", "b", "c"]


def test_least_load_counts_what_servers_report_of_others() -> None:
    known = Known()
    known.take(load={0: {"num_reported": 6, "num_in_flight_then": 2}, 1: {"num_reported": 3}})

    known.burst(11)

    in_flight = known.shared.totals(IN_FLIGHT, 3)
    assert [in_flight[0] + 4, in_flight[1] + 3, in_flight[2]] == [6, 6, 6]


def test_a_burst_is_spread_though_no_report_comes() -> None:
    known = Known()

    assert sorted(known.burst(30)) == sorted("abc" * 10)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_spreads_many_requests(policy: str) -> None:
    known = Known(policy=policy)
    urls = ""
    for number in range(120):
        urls += known.picks(1, key=b"key %d" % number)
        known.relays[0].add(IN_FLIGHT + "abc".index(urls[-1]))

    assert min(urls.count(url) for url in "abc") > 20


def test_the_prefix_policy_keeps_a_key_at_its_server() -> None:
    known = Known(policy="prefix")

    assert len(set(known.picks(9, key=b"one"))) == 1


def test_round_robin_ignores_the_load() -> None:
    known = Known(policy="round_robin")
    known.relays[0].add(IN_FLIGHT + 1)

    assert known.picks(4) == "abca"


def test_a_model_has_its_own_servers_and_an_unknown_one_has_none() -> None:
    known = Known(m=ModelRow(slots=(0,)), n=ModelRow(slots=(1, 2)))

    assert known.picks(2, model="m") == "aa"
    assert known.picks(2, model="n") == "bc"
    assert known.picks(1, model="x") == "-"
    assert known.servers.route("x").is_of_nobody
    assert not known.servers.route("n").is_of_nobody


@pytest.mark.parametrize("model", [None, "default"])
def test_no_name_and_the_default_one_are_the_same(model: str | None) -> None:
    known = Known(m=ModelRow(slots=(2,)))

    assert known.picks(1, model=model) == "c"


def test_a_model_may_have_the_name_of_the_default() -> None:
    known = Known(default=ModelRow(slots=(1,)), m=ModelRow(slots=(2,)))

    assert known.picks(1, model="default") == "b"


def test_what_a_table_says_of_a_model_without_servers_is_kept() -> None:
    known = Known(m=ModelRow(slots=(), may_wait=True, reason="g1 is wiring"))

    route = known.servers.route("m")

    assert known.picks(1) == "-"
    assert (route.may_wait, route.reason, route.http_status) == (True, "g1 is wiring", 503)


def test_while_a_server_is_there_nobody_waits() -> None:
    route = Known(m=ModelRow(slots=(0,), may_wait=True)).servers.route("m")

    assert not route.may_wait
    assert route.has_other(()) and not route.has_other({0})


def test_who_waits_hears_of_news_and_of_nothing_else() -> None:
    known = Known(m=ModelRow(slots=(), may_wait=True))
    num_news = known.num_news

    known.take(m=ModelRow(slots=(), may_wait=True), load={0: {"num_reported": 5}})
    assert known.num_news == num_news

    known.take(m=ModelRow(slots=(1,)))
    known.take(m=ModelRow(slots=()))
    assert known.num_news == num_news + 2


def test_a_server_that_refused_a_connection_gets_nothing_until_the_next_table() -> None:
    known = Known(2)
    first = known.servers.pick(known.servers.route("m"))
    assert first is not None and first.url == "a"

    known.servers.mark_unreachable(first)
    assert known.picks(2) == "bb"

    num_news = known.num_news
    known.take(2)
    assert sorted(known.picks(2)) == ["a", "b"]
    assert known.num_news == num_news + 1


def test_when_all_refused_a_connection_the_next_table_is_waited_for() -> None:
    known = Known(1, m=ModelRow(slots=(0,)))
    only = known.servers.pick(known.servers.route("m"))
    assert only is not None

    known.servers.mark_unreachable(only)

    assert known.servers.route("m").may_wait


def test_a_server_keeps_its_connections_over_tables_and_a_slot_may_change_hands() -> None:
    known = Known(1, m=ModelRow(slots=(0,)))
    route_of = known.servers.route
    first = known.servers.pick(route_of("m"))
    known.take(1, load={0: {"num_reported": 3}})
    again = known.servers.pick(route_of("m"))
    known.take(1, load={0: {"url": "elsewhere"}})
    moved = known.servers.pick(route_of("m"))

    assert first is again and again is not moved
    assert moved is not None and moved.url == "elsewhere"
