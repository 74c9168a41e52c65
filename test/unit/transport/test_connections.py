from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.transport.connections import Connections


def opened(*peers: tuple[bytes, int]) -> Connections:
    connections = Connections()
    for peer, descriptor in peers:
        connections.spoke(peer, descriptor)
    assert connections.settle([descriptor for _, descriptor in peers], []) == []
    return connections


def test_a_lost_descriptor_names_the_peer_that_spoke_over_it() -> None:
    connections = opened((b"a", 10), (b"b", 11))

    assert connections.settle([], [11]) == [b"b"]
    assert connections.is_known(b"a")
    assert not connections.is_known(b"b")


def test_a_connection_that_never_spoke_is_nobody() -> None:
    connections = opened((b"a", 10))

    assert connections.settle([11], []) == []
    assert connections.settle([], [11]) == []


def test_a_reused_descriptor_names_its_new_peer() -> None:
    connections = opened((b"a", 10))
    connections.settle([], [10])

    connections.spoke(b"b", 10)
    assert connections.settle([10], []) == []
    assert connections.settle([], [10]) == [b"b"]


def test_a_peer_and_its_successor_in_one_turn_are_told_apart() -> None:
    connections = opened((b"a", 10))

    connections.spoke(b"b", 10)

    assert connections.settle([10], [10]) == [b"a"]
    assert connections.settle([], [10]) == [b"b"]


def test_silent_connections_before_a_peer_on_its_descriptor_do_not_take_it_along() -> None:
    connections = Connections()

    connections.spoke(b"b", 10)

    assert connections.settle([10, 10, 10], [10, 10]) == []
    assert connections.settle([], [10]) == [b"b"]


def test_a_peer_that_came_and_went_in_one_turn_is_gone() -> None:
    connections = Connections()

    connections.spoke(b"a", 10)

    assert connections.settle([10], [10]) == [b"a"]


def test_a_peer_heard_after_its_end_is_gone() -> None:
    connections = Connections()
    connections.settle([10], [10])

    connections.spoke(b"a", 10)

    assert connections.settle([], []) == [b"a"]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30), st.data())
def test_every_peer_that_has_settled_is_told_once_when_it_goes(
    lives: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """Connections come and go on three descriptors; turns end anywhere between."""
    connections, here = Connections(), {}
    accepted: list[int] = []
    lost: list[int] = []
    told: list[bytes] = []
    went: list[bytes] = []
    for number, (descriptor, speaks) in enumerate(lives):
        if descriptor in here:
            lost.append(descriptor)
            went += [here[descriptor]] if here[descriptor] else []
        accepted.append(descriptor)
        here[descriptor] = b"%d" % number if speaks else b""
        if speaks:
            connections.spoke(here[descriptor], descriptor)
        # A newcomer settles before it goes: it has had an answer by then.
        if speaks or data.draw(st.booleans()):
            told += connections.settle(accepted, lost)
            accepted, lost = [], []
    told += connections.settle(accepted, lost)

    assert sorted(told) == sorted(went)
    assert all(connections.is_known(peer) for peer in here.values() if peer)
