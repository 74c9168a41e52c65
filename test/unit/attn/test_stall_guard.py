"""What ends a step that waits on the GPU, and what is left of it afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from sglang_afd.attn import stall_guard
from sglang_afd.attn.stall_guard import MAX_LOSSES, StallGuard
from sglang_afd.errors import PeerLost, StallTimeout

STALL_S, LIMIT_S = 10.0, 100.0
OPTIONS: Any = None


class Clock:
    """Stands still until told otherwise."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Slots:
    """Notes the link word as a slab would have it."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def abort(self) -> None:
        self.words.append("aborted")

    def detach(self) -> None:
        self.words.append("detached")


class Link:
    def __init__(self, slots: Slots) -> None:
        self.lost: str | None = None
        slots.words.append("attached")

    def mark_lost(self, reason: str) -> None:
        self.lost = self.lost or reason


class Bench:
    """A guard over slots of its own."""

    def __init__(self) -> None:
        self.slots = Slots()
        self.links: list[Link] = []
        self.guard: StallGuard[Any] = StallGuard(
            self.slots,
            self._make_link,
            stall_timeout_s=STALL_S,
            step_limit_s=LIMIT_S,
            synchronize=lambda: self.slots.words.append("idle"),
        )

    def _make_link(self, addresses: Sequence[str], options: Any) -> Any:
        self.links.append(Link(self.slots))
        return self.links[-1]

    def attach(self) -> Link:
        self.guard.connect(["ipc:///a"], OPTIONS)
        return self.links[-1]

    def lose(self, reason: str = "rank 0 is gone") -> None:
        self.links[-1].mark_lost(reason)
        self.guard.look()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stall_guard, "time", clock)
    return clock


@pytest.fixture
def bench(clock: Clock) -> Bench:
    bench = Bench()
    bench.attach()
    return bench


def test_a_step_waits_for_lost_servers_until_the_stall_timeout(bench: Bench, clock: Clock) -> None:
    bench.guard.launched()
    bench.lose()

    clock.now_s += STALL_S - 0.1
    bench.guard.look()
    bench.guard.check()
    clock.now_s += 0.1
    bench.guard.look()

    assert bench.slots.words == ["attached", "aborted"]
    with pytest.raises(StallTimeout, match="--afd-stall-timeout 10 s: rank 0 is gone"):
        bench.guard.finished()


def test_servers_that_come_back_in_time_end_the_stall(bench: Bench, clock: Clock) -> None:
    bench.guard.launched()
    bench.lose()
    clock.now_s += STALL_S - 0.1

    bench.attach()
    clock.now_s += STALL_S
    bench.guard.look()

    bench.guard.finished()
    assert bench.slots.words == ["attached", "attached"]


def test_a_loss_while_nothing_runs_aborts_nothing(bench: Bench, clock: Clock) -> None:
    bench.guard.launched()
    bench.guard.finished()
    bench.lose()

    clock.now_s += 10 * STALL_S
    bench.guard.look()

    assert bench.slots.words == ["attached"]


def test_the_clock_of_the_second_step_in_flight_begins_when_the_first_has_ended(
    bench: Bench, clock: Clock
) -> None:
    bench.guard.launched()
    bench.guard.launched()
    clock.now_s += LIMIT_S - 1
    bench.guard.finished()
    clock.now_s += LIMIT_S - 1
    bench.guard.look()
    bench.guard.check()

    clock.now_s += 1
    bench.guard.look()

    with pytest.raises(StallTimeout, match="75% of --watchdog-timeout"):
        bench.guard.check()


def test_servers_that_go_again_and_again_during_one_step_are_not_waited_for(
    bench: Bench, clock: Clock
) -> None:
    bench.guard.launched()
    for _ in range(MAX_LOSSES):
        bench.lose()
        bench.guard.check()
        bench.attach()

    bench.lose("the experts raised")

    with pytest.raises(StallTimeout, match="4 times during one step: the experts raised"):
        bench.guard.check()


def test_a_step_that_was_aborted_is_aborted_at_every_look_until_it_has_ended(
    bench: Bench, clock: Clock
) -> None:
    bench.guard.launched()
    bench.lose()
    clock.now_s += STALL_S
    for _ in range(3):
        bench.guard.look()

    bench.guard.give_up("it was")
    bench.guard.look()

    assert bench.slots.words == ["attached", *["aborted"] * 4, "idle", "detached"]


def test_nobody_attaches_between_an_abort_and_the_end_of_its_step(
    bench: Bench, clock: Clock
) -> None:
    bench.guard.launched()
    bench.lose()
    clock.now_s += STALL_S
    bench.guard.look()

    with pytest.raises(PeerLost, match="has not ended yet"):
        bench.attach()

    bench.guard.give_up("it was")
    bench.attach()
    assert bench.slots.words[-2:] == ["detached", "attached"]


def test_giving_up_loses_a_link_that_serves_so_that_its_servers_forget_what_was_pending(
    bench: Bench,
) -> None:
    bench.guard.launched()

    bench.guard.give_up("nobody was there when the step began")

    assert bench.links[-1].lost == "a step was given up: nobody was there when the step began"
    assert bench.slots.words == ["attached", "aborted", "idle", "detached"]
    bench.guard.check()


def test_a_look_does_not_abort_what_a_link_made_meanwhile_has_cured(
    bench: Bench, clock: Clock
) -> None:
    is_making, may_end = threading.Event(), threading.Event()
    make = bench._make_link

    def make_slowly(addresses: Sequence[str], options: Any) -> Any:
        is_making.set()
        assert may_end.wait(10)
        return make(addresses, options)

    bench.guard._make_link = make_slowly
    bench.guard.launched()
    bench.lose()
    clock.now_s += STALL_S
    attaching = threading.Thread(target=bench.attach)
    attaching.start()
    assert is_making.wait(10)

    looking = threading.Thread(target=bench.guard.look)
    looking.start()
    time.sleep(0.05)
    may_end.set()
    attaching.join(10)
    looking.join(10)

    bench.guard.check()
    assert bench.slots.words == ["attached", "attached"]


def test_closing_ends_what_runs_and_the_thread(bench: Bench) -> None:
    bench.guard.start()
    bench.guard.launched()

    bench.guard.close()

    assert not bench.guard._thread.is_alive()
    assert bench.slots.words[-2:] == ["idle", "detached"]
