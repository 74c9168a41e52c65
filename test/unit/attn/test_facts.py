"""What an attention server says of itself to the router."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from sglang_afd.attn.facts import AttnFacts, Name
from sglang_afd.attn.load import LoadBoard, RateMeter, SchedulerLoad
from sglang_afd.attn.status import LinkState, StatusBoard
from sglang_afd.protocol.registration import Condition, PeerLoss
from sglang_afd.registrar.facts import Facts

NAME = Name(server_id="a", models=("tiny",), url="http://127.0.0.1:1", peer_urls=("http://h:2",))
RANKS = ({"rank": 0, "boot_id": "m0"}, {"rank": 1, "boot_id": "m1"})


class Bench:
    def __init__(self) -> None:
        self.board = StatusBoard()
        self.is_warm = threading.Event()
        self.num_open = 0
        self.facts = AttnFacts(NAME, self.board, self.is_warm, lambda: self.num_open)

    def now(self) -> Facts:
        facts = self.facts()
        assert facts is not None
        return facts


@pytest.fixture
def bench() -> Bench:
    """Its scheduler is there, and not attached."""
    bench = Bench()
    bench.board.update(
        boot_id="attn-1-ab",
        fingerprint="ab" * 32,
        num_experts=16,
        max_running_requests=32,
        kv_tokens=8192,
    )
    return bench


def test_nothing_is_said_before_the_scheduler_has_sized_its_cache() -> None:
    bench = Bench()
    bench.board.update(boot_id="attn-1-ab", fingerprint="ab" * 32, num_experts=16)

    assert bench.facts() is None


def test_the_identity_is_that_of_the_scheduler(bench: Bench) -> None:
    identity = bench.now().identity

    assert (identity.boot_id, identity.fingerprint) == ("attn-1-ab", "ab" * 32)
    assert (identity.models, identity.peer_urls) == (("tiny",), ("http://h:2",))
    assert (identity.capacity.max_running_requests, identity.capacity.kv_tokens) == (32, 8192)


def test_a_server_starts_until_its_warm_up_is_over(bench: Bench) -> None:
    bench.board.update(state=LinkState.READY, ranks=RANKS)
    assert bench.now().standing.condition is Condition.STARTING

    bench.is_warm.set()

    standing = bench.now().standing
    assert standing.condition is Condition.READY
    assert standing.attached == ("m0", "m1")


def test_a_loss_names_the_servers_and_why(bench: Bench) -> None:
    bench.board.update(
        state=LinkState.STALLED,
        reason="rank 1 is gone",
        ranks=(),
        lost=("m0", "m1"),
        held_until_s=time.monotonic() + 60,
    )

    standing = bench.now().standing

    assert standing.condition is Condition.STALLED
    assert standing.reason == "rank 1 is gone"
    assert standing.lost == tuple(
        PeerLoss(boot_id=one, reason="rank 1 is gone") for one in ("m0", "m1")
    )


def test_a_stall_that_is_over_is_detached(bench: Bench) -> None:
    bench.board.update(state=LinkState.STALLED, held_until_s=time.monotonic() - 1)

    assert bench.now().standing.condition is Condition.DETACHED


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "num_open", "expected"),
    [
        (4, 1, 5, 1),  # all are seen
        (4, 0, 7, 3),  # three came while a step runs
        (8, 2, 3, 2),  # one request of a client may be several of the scheduler
        (0, 0, 0, 0),
    ],
)
def test_requests_that_no_scheduler_has_seen_wait(
    bench: Bench, num_running: int, num_waiting: int, num_open: int, expected: int
) -> None:
    load = SchedulerLoad(num_running=num_running, num_waiting=num_waiting, free_kv_tokens=5)
    bench.board.load.show(load, is_idle=False)
    bench.num_open = num_open

    told = bench.now().standing.load

    assert (told.num_running, told.num_waiting, told.free_kv_tokens) == (num_running, expected, 5)


def test_an_idle_scheduler_is_shown_at_once_after_a_step_and_then_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    board, load = LoadBoard(), SchedulerLoad(num_running=0, num_waiting=0, free_kv_tokens=1)
    assert board.is_stale()

    board.show(load, is_idle=False)
    assert board.is_stale()
    board.show(load, is_idle=True)
    assert not board.is_stale()
    now_s += 0.2
    assert board.is_stale()


def test_the_rate_is_that_of_the_last_seconds() -> None:
    meter = RateMeter(window_s=5.0)
    asked: list[Any] = [meter.rate(10 * second, float(second)) for second in range(11)]

    assert asked[0] == 0.0
    assert asked[1:] == [10.0] * 10
    assert meter.rate(100, 11.0) == pytest.approx(40 / 5)
    assert meter.rate(100, 30.0) == pytest.approx(0.0, abs=0.6)
    assert meter.rate(100, 40.0) == 0.0


def test_two_questions_at_once_are_no_infinite_rate() -> None:
    meter = RateMeter()

    assert [meter.rate(7, 1.0), meter.rate(9, 1.0)] == [0.0, 0.0]
