from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from sglang_afd.attn import recovery
from sglang_afd.attn.recovery import Recovery
from sglang_afd.attn.status import LinkState, StatusBoard
from sglang_afd.errors import ExchangeFailed, StallTimeout


class Runtime:
    """MLP servers that are there after some turns of waiting, or never.

    Args:
        num_turns: Of waiting, until they are there.
        num_held_turns: Of waiting, until requests are held no longer.
    """

    def __init__(self, num_turns: float = 0, num_held_turns: float = float("inf")) -> None:
        self.board = StatusBoard()
        self.board.update(state=LinkState.STALLED, reason="rank 0 is gone")
        self.num_steps = 7
        self._num_turns = num_turns
        self._num_held_turns = num_held_turns

    def hold_requests(self) -> None:
        self.board.update(held_until_s=time.monotonic() + 600.0)

    def wait_attached_again(self, timeout_s: float) -> bool:
        self._num_turns -= 1
        self._num_held_turns -= 1
        if self._num_held_turns < 0:
            self.board.update(held_until_s=time.monotonic())
        return self._num_turns < 0


class Scheduler:
    """SGLang's, as far as it is told to stop."""

    gracefully_exit = False


class Calls(list[tuple[str, ...]]):
    """What was done to the requests."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()

    def retract(scheduler: Any, is_hopeless: Callable[[str, int], bool]) -> tuple[int, int]:
        calls.append(("retract",))
        return 3, 1

    def fail(scheduler: Any, message: str) -> int:
        calls.append(("fail", message))
        return 4

    monkeypatch.setattr(recovery.requests, "retract_running_requests", retract)
    monkeypatch.setattr(recovery.requests, "fail_all_requests", fail)
    monkeypatch.setattr(recovery.requests, "read_input", lambda s: calls.append(("read",)))
    return calls


def recover(here: Any) -> Recovery:
    return Recovery(here)


ERROR = StallTimeout("no MLP server is attached")


def test_requests_are_retracted_and_input_is_read_until_mlp_servers_are_back(calls: Calls) -> None:
    here = Runtime(num_turns=2)

    recover(here).after_stall(Scheduler(), ERROR)  # type: ignore[arg-type]

    assert calls == [("retract",), ("read",), ("read",)]
    status = here.board.read()
    assert (status.num_retracted_requests, status.num_failed_requests) == (3, 1)


def test_every_request_fails_when_nobody_is_back_at_the_deadline(calls: Calls) -> None:
    here = Runtime(num_turns=float("inf"), num_held_turns=3)

    recover(here).after_stall(Scheduler(), ERROR)  # type: ignore[arg-type]

    assert calls == [
        ("retract",),
        *[("read",)] * 3,
        ("fail", "the MLP servers are away (rank 0 is gone); try again shortly"),
    ]
    assert here.board.read().num_failed_requests == 5


def test_requests_that_end_the_mlp_servers_again_and_again_fail_at_the_second_time(
    calls: Calls,
) -> None:
    recovery = recover(Runtime())
    recovery.after_stall(Scheduler(), ERROR)  # type: ignore[arg-type]

    recovery.after_stall(Scheduler(), ERROR)  # type: ignore[arg-type]

    assert [call[0] for call in calls] == ["retract", "fail"]
    assert "ran no step in two attempts" in calls[-1][1]


def test_a_step_in_between_makes_it_another_stall(calls: Calls) -> None:
    here = Runtime()
    recovery = recover(here)
    recovery.after_stall(Scheduler(), ERROR)  # type: ignore[arg-type]

    here.num_steps += 1
    recovery.after_stall(Scheduler(), ERROR)  # type: ignore[arg-type]

    assert calls == [("retract",), ("retract",)]


def hopeless_at(monkeypatch: pytest.MonkeyPatch, num_tokens: list[int]) -> list[bool]:
    """Of one request with so many tokens at each of several stalls, with steps between them."""
    found: list[bool] = []
    here = Runtime()
    recovery_ = recover(here)
    for number in num_tokens:

        def retract(
            scheduler: Any, is_hopeless: Callable[[str, int], bool], number: int = number
        ) -> tuple[int, int]:
            found.append(is_hopeless("a", number))
            return 1, 0

        monkeypatch.setattr(recovery.requests, "retract_running_requests", retract)
        here.num_steps += 1
        recovery_.after_stall(Scheduler(), ERROR)  # type: ignore[arg-type]
    return found


def test_a_request_that_gets_no_further_fails_whatever_runs_beside_it(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hopeless_at(monkeypatch, [0, 0, 0]) == [False, False, True]


def test_a_request_that_gets_a_token_between_two_stalls_may_go_on(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hopeless_at(monkeypatch, [0, 0, 1, 1, 5, 6, 7]) == [False] * 7


def test_requests_that_failed_leave_nothing_behind_for_those_that_come_later(calls: Calls) -> None:
    recovery = recover(Runtime())
    for _ in range(2):
        recovery.after_stall(Scheduler(), ERROR)  # type: ignore[arg-type]

    recovery.after_stall(Scheduler(), ERROR)  # type: ignore[arg-type]

    assert [call[0] for call in calls] == ["retract", "fail", "retract"]


def test_experts_that_raise_fail_the_requests_and_are_not_called_away(calls: Calls) -> None:
    error = ExchangeFailed("MLP rank 0 declined an exchange: no memory")

    recover(Runtime()).after_failure(Scheduler(), error)  # type: ignore[arg-type]

    [(what, message)] = calls
    assert what == "fail"
    assert message.startswith("the MLP servers could not run the experts (MLP rank 0 declined")


def test_a_server_that_is_told_to_stop_waits_no_longer(calls: Calls) -> None:
    scheduler = Scheduler()
    scheduler.gracefully_exit = True

    recover(Runtime(num_turns=float("inf"))).after_stall(scheduler, ERROR)  # type: ignore[arg-type]

    assert calls == [("retract",), ("read",)]
