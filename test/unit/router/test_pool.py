from __future__ import annotations

from contextlib import ExitStack

import pytest

from sgl_router_afd.policy import POLICIES
from sgl_router_afd.pool import ServerPool
from sgl_router_afd.readiness import ServerState, Verdict

READY = Verdict(state=ServerState.READY, reason="")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_pool(policy: str = "least_load", num_servers: int = 3, num_ready: int = 3) -> ServerPool:
    pool = ServerPool("abcdef"[:num_servers], POLICIES[policy], max_missed_polls=3, clock=Clock())
    for server in pool.servers[:num_ready]:
        pool.record_answer(server, READY)
    return pool


def picks(pool: ServerPool, num: int) -> str:
    chosen = [pool.pick() for _ in range(num)]
    return "".join(server.url if server else "-" for server in chosen)


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_equal_servers_take_turns(policy: str) -> None:
    assert picks(make_pool(policy), 7) == "abcabca"


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_turns_skip_servers_that_are_not_ready_and_those_excluded(policy: str) -> None:
    pool = make_pool(policy, num_servers=4, num_ready=3)

    chosen = [pool.pick(excluding={"b"}) for _ in range(4)]

    assert [server.url for server in chosen if server] == ["a", "c", "a", "c"]


def test_least_load_takes_the_server_with_the_fewest_in_flight() -> None:
    pool = make_pool()
    a, b, c = pool.servers
    with ExitStack() as leases:
        for server in (a, a, b, b, c):
            leases.enter_context(pool.lease(server))

        assert picks(pool, 3) == "ccc"

        leases.enter_context(pool.lease(c))
        assert picks(pool, 3) == "abc"
    assert [server.num_in_flight for server in pool.servers] == [0, 0, 0]


def test_round_robin_ignores_the_load() -> None:
    pool = make_pool("round_robin")

    with pool.lease(pool.servers[1]):
        assert picks(pool, 4) == "abca"


def test_a_lease_is_given_back_when_the_request_fails() -> None:
    pool = make_pool()

    with pytest.raises(RuntimeError), pool.lease(pool.servers[0]):
        raise RuntimeError

    assert pool.servers[0].num_in_flight == 0


def test_no_ready_server_gives_none_and_an_explanation_of_each() -> None:
    pool = make_pool(num_servers=2, num_ready=0)
    pool.record_answer(pool.servers[0], Verdict(state=ServerState.DETACHED, reason="no MLP peer"))

    assert pool.pick() is None
    assert pool.num_ready == 0
    assert pool.explain() == "a is detached (no MLP peer); b is unknown (not polled yet)"


STALLED = Verdict(state=ServerState.STALLED, reason="rank 0 is gone")


def test_a_stalled_server_is_a_second_choice() -> None:
    pool = make_pool(num_servers=3, num_ready=1)
    for server in pool.servers[1:]:
        pool.record_answer(server, STALLED)

    with pool.lease(pool.servers[0]), pool.lease(pool.servers[0]):
        assert picks(pool, 3) == "aaa"
    assert pool.num_ready == 1

    pool.record_unreachable(pool.servers[0], "connection refused")
    assert picks(pool, 3) == "bcb"


def test_the_other_stalled_server_is_tried_when_one_refuses_the_connection() -> None:
    pool = make_pool(num_servers=2, num_ready=0)
    for server in pool.servers:
        pool.record_answer(server, STALLED)

    assert pool.pick(excluding={"a"}) is pool.servers[1]
    assert pool.pick(excluding={"a", "b"}) is None


def test_a_stalled_server_keeps_its_place_through_a_missed_poll() -> None:
    pool = make_pool(num_servers=1, num_ready=0)
    pool.record_answer(pool.servers[0], STALLED)

    pool.record_silence(pool.servers[0], "late")

    assert pool.pick() is pool.servers[0]


def test_every_ready_server_excluded_gives_none() -> None:
    assert make_pool().pick(excluding={"a", "b", "c"}) is None


def test_a_ready_server_keeps_its_traffic_until_it_missed_enough_polls_in_a_row() -> None:
    pool = make_pool(num_servers=1, num_ready=1)
    (server,) = pool.servers

    pool.record_silence(server, "late")
    pool.record_silence(server, "late")
    pool.record_answer(server, READY)
    pool.record_silence(server, "late")
    pool.record_silence(server, "late")
    assert server.state is ServerState.READY

    pool.record_silence(server, "late")
    assert (server.state, server.reason) == (ServerState.UNREACHABLE, "late")


def test_a_server_that_never_answered_is_unreachable_at_the_first_missed_poll() -> None:
    pool = make_pool(num_servers=1, num_ready=0)

    pool.record_silence(pool.servers[0], "late")

    assert pool.servers[0].state is ServerState.UNREACHABLE


def test_a_refused_connection_takes_a_ready_server_out_at_once_and_an_answer_brings_it_back() -> (
    None
):
    pool = make_pool(num_servers=1, num_ready=1)

    pool.record_unreachable(pool.servers[0], "connection refused")
    assert pool.pick() is None

    pool.record_answer(pool.servers[0], READY)
    assert pool.pick() is pool.servers[0]


def test_last_seen_is_the_age_of_the_last_answer() -> None:
    clock = Clock()
    pool = ServerPool("ab", POLICIES["least_load"], max_missed_polls=3, clock=clock)
    pool.record_answer(pool.servers[0], READY)

    clock.now_s += 2.5
    pool.record_unreachable(pool.servers[0], "connection refused")

    assert pool.last_seen_ago_s(pool.servers[0]) == 2.5
    assert pool.last_seen_ago_s(pool.servers[1]) is None
