"""What an MLP server says of itself to the router."""

from __future__ import annotations

import time

import pytest

from sglang_afd.mlp.board import Board, Counter, State
from sglang_afd.mlp.facts import MlpFacts, Name
from sglang_afd.mlp.group import MemberReport
from sglang_afd.mlp.imbalance import ImbalanceMeter
from sglang_afd.mlp.place import NO_RANK, Place
from sglang_afd.protocol.registration import Condition, Shard

NAME = Name(server_id="m", url="http://127.0.0.1:2", peer_urls=(), num_experts=5)


def report(rank: int, boot_id: str = "mine", address: str = "") -> MemberReport:
    return MemberReport(
        rank=rank,
        ep_size=2,
        boot_id=boot_id,
        fingerprint="ab" * 32,
        exchange_address=address,
        sent_at_s=0.0,
    )


class Bench:
    def __init__(self, rank: int) -> None:
        self.board = Board(3)
        self.place = Place({}, report(rank), self.board)
        self.facts = MlpFacts(NAME, self.place, self.board)

    def serve(self) -> None:
        self.place.serve({}, "ipc:///run/0")
        self.board.words[Counter.STATE] = State.SERVING
        self.board.words[Counter.TURNED_AT_NS] = time.monotonic_ns()


def test_a_rank_loads_then_serves_its_experts() -> None:
    bench = Bench(1)
    loading = bench.facts()
    bench.serve()
    serving = bench.facts()

    assert loading.standing.condition is Condition.LOADING
    assert loading.identity.exchange_address == ""
    assert serving.standing.condition is Condition.READY
    assert serving.identity.exchange_address == "ipc:///run/0"
    assert serving.identity.shard == Shard(ep_rank=1, ep_size=2, first_expert=3, stop_expert=5)
    assert serving.identity.models == ()


def test_a_spare_has_no_shard_and_says_why_it_waits() -> None:
    bench = Bench(NO_RANK)
    bench.place.wait("no rank is free")

    facts = bench.facts()

    assert facts.identity.shard is None
    assert (facts.standing.condition, facts.standing.reason) == (Condition.SPARE, "no rank is free")


def test_a_rank_that_another_serves_is_displaced() -> None:
    bench = Bench(1)
    bench.serve()
    bench.place.refusal = "rank 1 is already served by another"

    assert bench.facts().standing.condition is Condition.DISPLACED


def test_a_loop_that_hangs_is_stalled() -> None:
    bench = Bench(1)
    bench.serve()
    bench.board.words[Counter.TURNED_AT_NS] = time.monotonic_ns() - int(61e9)

    assert bench.facts().standing.condition is Condition.STALLED


def test_rank_0_hears_attention_servers_and_the_other_ranks() -> None:
    bench = Bench(0)
    bench.place.lead(is_successor=False)
    bench.serve()
    assert bench.place.group is not None
    bench.place.group.report(report(1, "other", "ipc:///run/1"))
    bench.board.peers.attached(b"1", "attn-1")
    bench.board.peers.attached(b"2", "attn-2")
    bench.board.peers.gone(b"2", "attn-2", reason="silent")

    standing = bench.facts().standing

    assert standing.attached == ("attn-1", "other")
    assert [(one.boot_id, one.reason) for one in standing.lost] == [("attn-2", "silent")]


def test_the_load_tells_how_uneven_its_experts_are() -> None:
    bench = Bench(1)
    bench.board.words[len(Counter) :] = [6, 2, 1]

    assert bench.facts().standing.load.expert_imbalance == 2.0


def test_only_rows_of_late_count() -> None:
    meter = ImbalanceMeter(window_s=10.0)
    assert meter.measure([0, 0], 0.0) == 0.0
    assert meter.measure([90, 10], 5.0) == pytest.approx(1.8)
    for second in range(6, 17):
        meter.measure([90, 10], float(second))

    assert meter.measure([100, 20], 17.0) == pytest.approx(1.0)
    assert meter.measure([100, 20], 60.0) == pytest.approx(1.0)
