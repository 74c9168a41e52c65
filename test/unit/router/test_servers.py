from __future__ import annotations

import pytest

from sgl_router_afd.dataplane.counters import IN_FLIGHT, RelayCounters, SharedCounters
from sgl_router_afd.dataplane.messages import ServerRow, Table
from sgl_router_afd.dataplane.reading import ReadBuffer
from sgl_router_afd.dataplane.server import Server
from sgl_router_afd.dataplane.servers import Servers
from sgl_router_afd.policy import POLICIES
from sgl_router_afd.readiness import ServerState

READY, STALLED, DETACHED = ServerState.READY, ServerState.STALLED, ServerState.DETACHED


class Known:
    """Servers a, b, c ... in given states, and the counters of two relay processes."""

    def __init__(self, *states: ServerState, policy: str = "least_load") -> None:
        self.shared = SharedCounters.create(2)
        self.relays = [RelayCounters(self.shared, relay) for relay in range(2)]
        self.num_wakes = 0
        self.servers = Servers(POLICIES[policy], self.shared, _server, self._wake)
        self.become(*states)

    def become(self, *states: ServerState) -> None:
        rows = [
            ServerRow(slot=slot, url="abcdef"[slot], state=state, reason=state.value)
            for slot, state in enumerate(states)
        ]
        self.servers.take(Table(rows=tuple(rows)))

    def picks(self, num: int, *, excluding: tuple[int, ...] = ()) -> str:
        chosen = [self.servers.pick(excluding=excluding) for _ in range(num)]
        return "".join(server.url if server else "-" for server in chosen)

    def _wake(self) -> None:
        self.num_wakes += 1


def _server(row: ServerRow) -> Server:
    return Server(row.url, row.slot, ReadBuffer(1), connect_timeout_s=1.0)


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_equal_servers_take_turns(policy: str) -> None:
    assert Known(READY, READY, READY, policy=policy).picks(7) == "abcabca"


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_turns_skip_servers_that_are_not_ready_and_those_excluded(policy: str) -> None:
    known = Known(READY, READY, READY, DETACHED, policy=policy)

    assert known.picks(4, excluding=(1,)) == "acac"


def test_two_relay_processes_take_turns_together() -> None:
    one = Known(READY, READY, READY)
    two = Servers(POLICIES["round_robin"], one.shared, _server, lambda: None)
    two.take(
        Table(rows=tuple(ServerRow(slot=i, url="abc"[i], state=READY, reason="") for i in range(3)))
    )

    chosen = [servers.pick() for servers in (one.servers, two, one.servers, two)]

    assert [server.url for server in chosen if server] == ["a", "b", "c", "a"]


def test_least_load_takes_the_server_with_the_fewest_in_flight_over_all_relay_processes() -> None:
    known = Known(READY, READY, READY)
    one, two = known.relays
    for relay, slot in ((one, 0), (two, 0), (one, 1), (two, 1), (two, 2)):
        relay.add(IN_FLIGHT + slot)

    assert known.picks(3) == "ccc"

    one.add(IN_FLIGHT + 2)
    assert known.picks(3) == "abc"


def test_round_robin_ignores_the_load() -> None:
    known = Known(READY, READY, READY, policy="round_robin")
    known.relays[0].add(IN_FLIGHT + 1)

    assert known.picks(4) == "abca"


def test_no_ready_server_gives_none_and_an_explanation_of_each() -> None:
    known = Known(DETACHED, ServerState.UNKNOWN)

    assert known.servers.pick() is None
    assert known.servers.explain() == "a is detached (detached); b is unknown (unknown)"
    assert not known.servers.may_get_ready()


def test_a_stalled_server_gets_nothing_but_is_worth_waiting_for() -> None:
    known = Known(STALLED, DETACHED)

    assert known.servers.pick() is None
    assert known.servers.may_get_ready()


def test_every_ready_server_excluded_gives_none() -> None:
    known = Known(READY, READY)

    assert known.servers.pick(excluding={0, 1}) is None
    assert not known.servers.has_other({0, 1})
    assert known.servers.has_other({0})


def test_who_waits_is_woken_when_a_server_gets_ready_and_only_then() -> None:
    known = Known(STALLED, DETACHED)
    assert known.num_wakes == 0

    known.become(READY, DETACHED)
    known.become(READY, STALLED)
    known.become(STALLED, STALLED)
    assert known.num_wakes == 1


def test_a_server_that_refused_a_connection_gets_nothing_until_the_next_table() -> None:
    known = Known(READY, READY)
    first = known.servers.pick()
    assert first is not None

    known.servers.mark_unreachable(first, "connection refused")
    assert known.picks(2) == "bb"

    known.become(READY, READY)
    assert known.picks(2) == "ab"


def test_a_server_that_left_the_table_gets_nothing() -> None:
    known = Known(READY, READY)

    known.become(READY)

    assert known.picks(2) == "aa"
