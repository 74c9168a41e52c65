from __future__ import annotations

from sgl_router_afd.dataplane.messages import ServerRow, Table
from sgl_router_afd.pool import ServerPool
from sgl_router_afd.readiness import ServerState, Verdict

READY = Verdict(state=ServerState.READY, reason="")
STALLED = Verdict(state=ServerState.STALLED, reason="rank 0 is gone")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_pool(num_servers: int = 3, num_ready: int = 3) -> ServerPool:
    pool = ServerPool("abcdef"[:num_servers], max_missed_polls=3, clock=Clock())
    for server in pool.servers[:num_ready]:
        pool.record_answer(server, READY)
    return pool


def test_the_table_has_every_server_with_its_state_and_reason() -> None:
    pool = make_pool(num_servers=2, num_ready=1)

    pool.record_answer(pool.servers[1], STALLED)

    assert pool.table() == Table(
        rows=(
            ServerRow(slot=0, url="a", state=ServerState.READY, reason=""),
            ServerRow(slot=1, url="b", state=ServerState.STALLED, reason="rank 0 is gone"),
        )
    )
    assert pool.num_ready == 1


def test_every_change_is_published_and_nothing_else() -> None:
    published: list[Table] = []
    pool = make_pool(num_servers=1, num_ready=1)
    (server,) = pool.servers

    pool.publish_to(published.append)
    pool.record_answer(server, READY)
    pool.record_silence(server, "late")
    pool.record_answer(server, STALLED)
    pool.record_unreachable(server, "connection refused")

    assert [table.rows[0].state for table in published] == ["ready", "stalled", "unreachable"]


def test_a_stalled_server_keeps_its_state_through_a_missed_poll() -> None:
    pool = make_pool(num_servers=1, num_ready=0)
    pool.record_answer(pool.servers[0], STALLED)

    pool.record_silence(pool.servers[0], "late")

    assert pool.servers[0].state is ServerState.STALLED


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
    assert pool.num_ready == 0

    pool.record_answer(pool.servers[0], READY)
    assert pool.num_ready == 1


def test_last_seen_is_the_age_of_the_last_answer() -> None:
    clock = Clock()
    pool = ServerPool("ab", max_missed_polls=3, clock=clock)
    pool.record_answer(pool.servers[0], READY)

    clock.now_s += 2.5
    pool.record_unreachable(pool.servers[0], "connection refused")

    assert pool.last_seen_ago_s(pool.servers[0]) == 2.5
    assert pool.last_seen_ago_s(pool.servers[1]) is None
