from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.rounds.arrival import ArrivalQueue
from sglang_afd.rounds.units import Intent, Member, Unit


def member(peer: bytes = b"a", *, layer_id: int = 0, step: int = 1) -> Member:
    return Member(peer=peer, micro_batch_id=0, step=step, layer_id=layer_id, num_rows=3)


def drain(queue: ArrivalQueue) -> list[Unit]:
    units = []
    while (unit := queue.next_unit(0.0)) is not None:
        units.append(unit)
    return units


def test_nothing_waits_in_the_beginning() -> None:
    queue = ArrivalQueue()

    assert queue.next_unit(0.0) is None
    assert queue.wake_at_s(0.0) is None
    assert len(queue) == 0


def test_exchanges_are_served_one_by_one_as_they_arrived() -> None:
    queue = ArrivalQueue()
    members = [member(b"b", layer_id=5), member(b"a", layer_id=0), member(b"b", layer_id=1)]
    for one in members:
        queue.arrived(one, 0.0)

    units = drain(queue)

    assert units == [
        Unit(layer_id=one.layer_id, members=(one,), num_rows=one.num_rows) for one in members
    ]


def test_what_a_peer_sent_before_it_left_is_not_served() -> None:
    queue = ArrivalQueue()
    for one in (member(b"a"), member(b"b"), member(b"a", layer_id=1)):
        queue.arrived(one, 0.0)

    queue.peer_gone(b"a", 0.0)

    assert [unit.members for unit in drain(queue)] == [(member(b"b"),)]


def test_the_leaving_of_a_peer_without_work_changes_nothing() -> None:
    queue = ArrivalQueue()
    queue.arrived(member(b"a"), 0.0)

    queue.peer_gone(b"stranger", 0.0)

    assert len(queue) == 1


def test_nobody_is_waited_for() -> None:
    queue = ArrivalQueue()
    queue.announced(Intent(peer=b"b", step=1, num_rows=3), 0.0)
    queue.arrived(member(b"a"), 0.0)

    assert queue.wake_at_s(0.0) == 0.0
    assert len(drain(queue)) == 1


@given(st.lists(st.sampled_from("abcS") | st.integers(0, 3), max_size=40))
def test_no_exchange_of_a_present_peer_is_lost_doubled_or_overtaken(script: list[object]) -> None:
    queue, expected, step = ArrivalQueue(), [], 0
    for action in script:
        if action == "S":  # serve one
            unit = queue.next_unit(0.0)
            assert (unit and unit.members[0]) == (expected.pop(0) if expected else None)
        elif isinstance(action, str):  # that peer leaves
            queue.peer_gone(action.encode(), 0.0)
            expected = [one for one in expected if one.peer != action.encode()]
        else:
            step += 1
            one = member("abcd"[action].encode(), step=step)
            queue.arrived(one, 0.0)
            expected.append(one)
        assert len(queue) == len(expected)

    assert [unit.members[0] for unit in drain(queue)] == expected
