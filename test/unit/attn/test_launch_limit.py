"""How far an eager step may be launched ahead of a GPU that stands still."""

from __future__ import annotations

import threading

from sglang_afd.attn.launch_limit import LaunchLimit

PATIENCE_S = 20.0


def test_the_host_waits_for_a_gpu_that_stands_still_and_goes_on_with_it() -> None:
    goes_on = threading.Event()
    launched = []

    def launch() -> None:
        limit = LaunchLimit(lambda: goes_on.is_set, most_ahead=3)
        for number in range(10):
            limit.launched()
            launched.append(number)
            if number == 2:
                has_launched.set()

    has_launched = threading.Event()
    thread = threading.Thread(target=launch)
    thread.start()
    has_launched.wait(PATIENCE_S)
    thread.join(0.05)
    assert launched == [0, 1, 2]

    goes_on.set()

    thread.join(PATIENCE_S)
    assert launched == list(range(10))


def test_a_gpu_that_keeps_up_is_not_waited_for() -> None:
    places = []

    def mark() -> object:
        places.append(len(places))
        place = places[-1]
        return lambda: place <= len(places) - 3  # it is always two exchanges behind

    limit = LaunchLimit(mark, most_ahead=3)  # type: ignore[arg-type]
    for _ in range(100):
        limit.launched()

    assert len(places) == 100
