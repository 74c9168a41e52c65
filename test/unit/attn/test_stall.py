"""What the attention role makes of a lost group: its exchanges are kept, and sent to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import SPEC
from torch import Tensor
from traffic import SEED, random_rows
from transports import PATIENCE_S, Fleet, ReferenceExperts, Zmq

from sglang_afd.attn import attach
from sglang_afd.attn.attach import Attacher
from sglang_afd.attn.host_exchange import HostExchange
from sglang_afd.attn.micro_batch import MicroBatch
from sglang_afd.attn.runtime import Runtime
from sglang_afd.attn.status import LinkState, StatusBoard
from sglang_afd.config import AfdConfig, Role
from sglang_afd.errors import ExchangeFailed, PeerLost, StallTimeout
from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.base import Arrived, Rows
from sglang_afd.transport.server_info import Member, ServerInfo
from sglang_afd.transport.zmq_link import LinkOptions, ZmqLink
from sglang_afd.upstream.server_args import ServerArgs

NUM_MICRO_BATCHES = 4


class Args(ServerArgs):
    """What the runtime reads of SGLang's arguments, without a model to check them against."""

    def __init__(self) -> None:
        self.watchdog_timeout = 300.0
        self.port = 30000
        self.device = "cpu"


def place(micro_batch_id: int) -> MicroBatch:
    return MicroBatch(id=micro_batch_id, number=NUM_MICRO_BATCHES, most_rows=SPEC.max_rows)


class Side:
    """The attention side of a fleet: the real runtime and attacher, and no scheduler."""

    def __init__(self, fleet: Fleet, stall_timeout_s: float, watchdog_s: float = 300.0) -> None:
        self.board = StatusBoard()
        url = "http://127.0.0.1:1"
        config = AfdConfig(role=Role.ATTN, mlp_url=url, stall_timeout_s=stall_timeout_s)
        args = Args()
        args.watchdog_timeout = watchdog_s
        self.runtime = Runtime(config, args, self.board)
        options = LinkOptions(
            server_id="attn-0",
            spec=SPEC,
            secret=b"",
            heartbeat_timeout_s=30.0,
            stall_timeout_s=stall_timeout_s,
        )
        self.attacher = Attacher(url, options, self.board, connect=ZmqLink)
        self.runtime._attacher = self.attacher
        self.runtime.exchange = HostExchange(self.attacher, SPEC.max_rows)
        self.attacher.start()

    def send(self, layer_id: int, micro_batch_id: int, rows: Rows) -> None:
        """One exchange of a step of several micro-batches."""
        self.runtime.exchange.send(
            layer_id, place(micro_batch_id), rows, first_row=0, is_whole=True
        )

    def receive(self, micro_batch_id: int) -> Tensor:
        """The sum of what was sent last for this micro-batch."""
        return self.runtime.exchange.receive(place(micro_batch_id), 0, is_whole=True)

    def be_patient(self) -> None:
        """No step over a link that is made from now on is given up on a slow machine."""
        self.attacher._options = replace(self.attacher._options, stall_timeout_s=PATIENCE_S)

    def wait_state(self, state: LinkState) -> None:
        """Until the status board says so."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.board.read().state is not state:
            assert time.monotonic() < deadline_s, self.board.read()
            time.sleep(0.01)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Ranks over ZeroMQ, found as over HTTP; none answers before it was started."""
    fleet = Fleet(Zmq("ipc", tmp_path))

    def fetch_info(url: str) -> ServerInfo:
        if not fleet.ranks:
            raise PeerLost("no MLP server answers")
        group = [
            Member(rank=number, exchange_address=rank.hub.address)
            for number, rank in enumerate(fleet.ranks)
        ]
        return ServerInfo(role="mlp", ep_rank=0, group=tuple(group))

    monkeypatch.setattr(attach, "fetch_info", fetch_info)
    monkeypatch.setattr(attach, "RETRY_S", 0.02)
    yield fleet
    fleet.close()


@pytest.fixture
def make_side(fleet: Fleet) -> Iterator[Callable[..., Side]]:
    """Attention sides, closed at the end."""
    sides: list[Side] = []

    def make(stall_timeout_s: float = PATIENCE_S, **kwargs: Any) -> Side:
        sides.append(Side(fleet, stall_timeout_s, **kwargs))
        return sides[-1]

    yield make
    for side in sides:
        side.attacher.close()


def later(delay_s: float, act: Callable[[], object]) -> threading.Timer:
    """Do something while the test's own thread waits."""
    timer = threading.Timer(delay_s, act)
    timer.start()
    return timer


def some_rows(number: int) -> list[Rows]:
    generator = torch.Generator().manual_seed(SEED)
    return [random_rows(SPEC, 1 + index % SPEC.max_rows, generator) for index in range(number)]


def test_what_every_micro_batch_has_in_flight_is_served_by_the_ranks_that_come_next(
    fleet: Fleet, make_side: Callable[..., Side]
) -> None:
    before, after = (ReferenceExperts(SPEC, 2, seed=seed) for seed in (1, 2))
    side, rows = make_side(), some_rows(NUM_MICRO_BATCHES)
    first, second = fleet.start(SPEC, before.run, 2, boot_id="aaaaaaaa00000000")
    side.wait_state(LinkState.READY)
    second.pause()  # so that half of each sum arrives from those that die

    def die_and_return() -> None:
        first.stop()
        second.stop()
        fleet.start(SPEC, after.run, 2, boot_id="bbbbbbbb00000000")

    with side.runtime.step(1, Kind.DECODE):
        for micro_batch_id, part in enumerate(rows):
            side.send(1, micro_batch_id, part)
        first.wait_for(Arrived, NUM_MICRO_BATCHES)
        death = later(0.1, die_and_return)
        sums = [side.receive(index) for index in range(NUM_MICRO_BATCHES)]
    death.join()

    for part, total in zip(rows, sums, strict=True):
        assert torch.equal(total, after.expected(1, part))
    assert (side.board.read().num_losses, side.board.read().num_attaches) == (1, 2)


def test_a_step_that_finds_nobody_waits_for_whoever_comes(
    fleet: Fleet, make_side: Callable[..., Side]
) -> None:
    experts, [rows] = ReferenceExperts(SPEC, 1, seed=1), some_rows(1)
    side = make_side()
    arrival = later(0.2, lambda: fleet.start(SPEC, experts.run))

    with side.runtime.step(1, Kind.PREFILL):
        side.send(0, 0, rows)
        total = side.receive(0)
    arrival.join()

    assert torch.equal(total, experts.expected(0, rows))


def test_rows_whose_experts_raise_are_not_sent_again(
    fleet: Fleet, make_side: Callable[..., Side]
) -> None:
    experts, rows = ReferenceExperts(SPEC, 1, seed=1), some_rows(2)
    calls: list[Rows] = []

    def run(rank: int, layer_id: int, rows: Rows) -> Tensor:
        calls.append(rows)
        if len(calls) == 1:
            raise ValueError("no memory")
        return experts.run(rank, layer_id, rows)

    fleet.start(SPEC, run)
    side = make_side()

    with pytest.raises(ExchangeFailed, match="no memory"), side.runtime.step(1, Kind.DECODE):
        side.send(0, 0, rows[0])
        side.receive(0)

    assert len(calls) == 1
    with side.runtime.step(2, Kind.DECODE):  # another one is served
        side.send(0, 0, rows[1])
        assert torch.equal(side.receive(0), experts.expected(0, rows[1]))


def test_a_step_is_given_up_at_the_deadline_and_the_next_one_finds_no_trace_of_it(
    fleet: Fleet, make_side: Callable[..., Side]
) -> None:
    experts, rows = ReferenceExperts(SPEC, 1, seed=1), some_rows(3)
    [rank] = fleet.start(SPEC, experts.run)
    side = make_side(0.3)
    side.wait_state(LinkState.READY)
    rank.pause()
    ranks, fleet.ranks = fleet.ranks, []  # there is nobody to attach to before the step has ended

    with (
        pytest.raises(StallTimeout, match=r"\[0\] did not reply within --afd-stall-timeout 0.3 s"),
        side.runtime.step(1, Kind.DECODE),
    ):
        side.send(0, 0, rows[0])
        side.send(0, 1, rows[1])
        side.receive(0)
    side.be_patient()
    fleet.ranks = ranks
    side.runtime.hold_requests()
    assert side.runtime.wait_attached_again(PATIENCE_S)
    rank.resume()

    with side.runtime.step(2, Kind.DECODE):
        side.send(0, 1, rows[2])
        assert torch.equal(side.receive(1), experts.expected(0, rows[2]))
    assert side.runtime.num_steps == 1


def test_losses_one_after_the_other_do_not_keep_a_step_longer_than_the_watchdog_allows(
    fleet: Fleet, make_side: Callable[..., Side]
) -> None:
    side = make_side(PATIENCE_S, watchdog_s=1.0)
    [rows] = some_rows(1)
    started_s = time.monotonic()

    with pytest.raises(StallTimeout), side.runtime.step(1, Kind.DECODE):
        side.send(0, 0, rows)

    assert time.monotonic() - started_s < PATIENCE_S / 2


def test_a_rank_that_does_not_reply_keeps_no_step_longer_than_the_watchdog_allows(
    fleet: Fleet, make_side: Callable[..., Side]
) -> None:
    [rank] = fleet.start(SPEC, ReferenceExperts(SPEC, 1, seed=1).run)
    side = make_side(PATIENCE_S, watchdog_s=1.0)
    side.wait_state(LinkState.READY)
    rank.pause()
    [rows] = some_rows(1)
    started_s = time.monotonic()

    with (
        pytest.raises(StallTimeout, match="--watchdog-timeout|the time that its step had left"),
        side.runtime.step(1, Kind.DECODE),
    ):
        side.send(0, 0, rows)
        side.receive(0)

    assert time.monotonic() - started_s < PATIENCE_S / 2
    rank.resume()


def test_a_server_that_stops_has_not_lost_its_mlp_servers(
    fleet: Fleet, make_side: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    fleet.start(SPEC, ReferenceExperts(SPEC, 1, seed=1).run)
    side = make_side()
    side.wait_state(LinkState.READY)

    side.attacher.close()

    assert side.board.read().num_losses == 0
    assert "lost" not in caplog.text


def test_a_loss_is_a_stall_for_as_long_as_requests_are_held_and_detached_afterwards(
    fleet: Fleet, make_side: Callable[..., Side]
) -> None:
    [rank] = fleet.start(SPEC, ReferenceExperts(SPEC, 1, seed=1).run)
    side = make_side(5.0)
    side.wait_state(LinkState.READY)

    rank.stop()
    fleet.ranks = []
    side.wait_state(LinkState.STALLED)

    status = side.board.read()
    assert status.held_until_s - status.stalled_since_s == pytest.approx(5.0)
    assert status.at(status.held_until_s - 0.1).state is LinkState.STALLED
    assert status.at(status.held_until_s).state is LinkState.DETACHED
    side.runtime.hold_requests()
    assert side.board.read().held_until_s >= status.held_until_s
