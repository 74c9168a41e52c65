from __future__ import annotations

from sgl_router_afd.slots import COOL_S, Slots

A, B, C = ("a", "http://a:1"), ("b", "http://b:1"), ("c", "http://c:1")


class Counted:
    """Slots whose traffic tests set."""

    def __init__(self, num: int) -> None:
        self.busy: set[int] = set()
        self.new_owners: list[int] = []
        self.slots = Slots(num, lambda slot: slot not in self.busy, self.new_owners.append)


def test_every_server_has_a_slot_of_its_own_and_keeps_it() -> None:
    slots = Counted(8).slots

    slots.take([A, B], 0.0)
    slots.take([C, B, A], 1.0)

    assert [slots.of(name) for name in "abc"] == [0, 1, 2]
    assert [slots.owner(slot) for slot in range(4)] == ["a", "b", "c", None]


def test_a_server_that_comes_back_has_its_slot_again() -> None:
    slots = Counted(8).slots
    slots.take([A, B], 0.0)

    slots.take([B], 1.0)
    away = slots.of("a")
    slots.take([A, B], 2.0)

    assert (away, slots.of("a")) == (None, 0)


def test_a_server_that_moved_gets_another_slot_since_relays_may_count_for_the_old_one() -> None:
    slots = Counted(8).slots
    slots.take([A], 0.0)

    slots.take([("a", "http://a:2")], 1.0)

    assert slots.of("a") == 1


def test_a_slot_goes_to_another_server_only_when_it_has_cooled_and_nothing_is_in_flight() -> None:
    counted = Counted(1)
    slots = counted.slots
    slots.take([A], 0.0)
    slots.take([], 10.0)
    counted.busy = {0}

    too_hot = slots.take([B], 10.0 + COOL_S - 1)
    too_busy = slots.take([B], 10.0 + COOL_S)
    counted.busy = set()
    left_out = slots.take([B], 10.0 + COOL_S)

    assert (too_hot, too_busy, left_out) == ([B], [B], [])
    assert slots.of("b") == 0
    assert counted.new_owners == [0, 0]


def test_the_slot_of_a_server_that_came_back_is_not_given_away() -> None:
    slots = Counted(1).slots
    slots.take([A], 0.0)
    slots.take([], 1.0)
    slots.take([A], 2.0)

    left_out = slots.take([A, B], 2.0 + COOL_S)

    assert (left_out, slots.of("a")) == ([B], 0)


def test_more_servers_than_slots_leave_the_last_ones_without() -> None:
    slots = Counted(2).slots

    left_out = slots.take([A, B, C], 0.0)

    assert left_out == [C]
    assert slots.of("c") is None
