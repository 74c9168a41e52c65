"""The loop that enqueues ahead, over a device that runs strictly in order and really waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from device_simulator import LAYERS, World
from msgspec.structs import replace

from sglang_afd.mlp.board import Counter
from sglang_afd.rounds.prediction import Predictor
from sglang_afd.rounds.units import Member

SEEDS = range(12)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("rings_always", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_ends_whatever_the_order_of_events(
    seed: int, rings_always: bool, num_ranks: int
) -> None:
    world = World(seed, num_ranks=num_ranks, rings_always=rings_always)

    world.run()

    assert all(attn.is_done for attn in world.attns)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_those_that_die_in_the_middle_of_a_round_hold_up_nobody(seed: int, num_ranks: int) -> None:
    World(seed, num_attn=5, num_ranks=num_ranks, deaths=3, rings_always=False).run()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_server_that_attaches_again_in_the_middle_of_a_step_goes_on(
    seed: int, num_ranks: int
) -> None:
    World(seed, num_attn=4, num_ranks=num_ranks, losses=6, deaths=1).run()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_without_rounds_every_exchange_is_served_when_its_doorbell_rang(
    seed: int, num_ranks: int
) -> None:
    world = World(seed, num_ranks=num_ranks, has_rounds=False, losses=2)

    world.run()

    assert {size for rank in world.ranks for size in rank.device.sizes} <= {1}


def test_members_of_a_round_run_together() -> None:
    world = World(1, num_attn=4, num_steps=20)

    world.run()

    sizes = world.ranks[0].device.sizes
    assert sum(sizes) / len(sizes) > 1.5  # of 4, with prefill and unequal micro-batches between


def test_what_the_loop_did_is_on_the_board() -> None:
    world = World(3, num_attn=2, num_steps=4)

    world.run()

    counts = world.ranks[0].board.read()
    num_exchanges = sum(name == "send" for attn in world.attns for name, _ in attn.operations)
    assert counts[Counter.EXCHANGES] == num_exchanges
    assert counts[Counter.LAUNCHES] == counts[Counter.RUNS] == counts[Counter.EAGER_RUNS]
    assert (counts[Counter.IN_FLIGHT], counts[Counter.WAITING]) == (0, 0)
    rows = sum(
        request.num_rows
        for attn in world.attns
        for name, request in attn.operations
        if name == "send"
    )
    assert counts[Counter.ROWS] == rows


# The simulation finds what it is there to find.


def fails_somewhere(match: str, **scene: object) -> None:
    with pytest.raises(AssertionError, match=match):
        for seed in range(60):
            World(seed, **scene).run()  # type: ignore[arg-type]


class PredictsPrefill(Predictor):
    def arrived(self, member: Member) -> list[Member]:
        found = super().arrived(member)
        if member.is_prefill and member.layer_id != LAYERS[-1]:
            following = LAYERS[LAYERS.index(member.layer_id) + 1]
            found.append(replace(member, layer_id=following))
        return found


def test_it_finds_a_prefill_that_is_waited_for() -> None:
    fails_somewhere("prefill is never waited for", make_predictor=lambda: PredictsPrefill(LAYERS))


class TakesMicroBatchesForGranted(Predictor):
    """All of the first layer comes when one micro-batch of it did; others are no condition."""

    def _goes_on(self, state: object, micro_batch_id: int, layer: int) -> bool:
        return True


def test_it_finds_a_layer_that_is_waited_for_before_its_reply_is_enqueued() -> None:
    fails_somewhere(
        "which needs a reply", make_predictor=lambda: TakesMicroBatchesForGranted(LAYERS)
    )


class LooksAtItselfOnly(Predictor):
    """A micro-batch goes on when its own reply is enqueued, whatever the others wait for."""

    def _goes_on(self, state: object, micro_batch_id: int, layer: int) -> bool:
        return state.replied.get(micro_batch_id, -1) >= layer  # type: ignore[attr-defined]


def test_it_finds_a_micro_batch_that_goes_on_before_an_earlier_one() -> None:
    fails_somewhere(
        "which needs a reply",
        make_predictor=lambda: LooksAtItselfOnly(LAYERS),
        num_attn=4,
        losses=12,
    )


class PredictsTheNextStep(Predictor):
    def enqueued(self, members: Sequence[Member]) -> list[Member]:
        found = super().enqueued(members)
        return found + [
            replace(member, layer_id=LAYERS[0], step=member.step + 1)
            for member in members
            if member.layer_id == LAYERS[-1]
        ]


def test_it_finds_a_next_step_that_is_waited_for() -> None:
    fails_somewhere("never come|needs a reply", make_predictor=lambda: PredictsTheNextStep(LAYERS))


def test_it_finds_a_dead_peer_that_is_waited_for() -> None:
    fails_somewhere("nothing goes on", marks_dead=False, deaths=2)


def test_it_finds_that_a_rank_attached_in_the_middle_of_a_step_needs_every_doorbell() -> None:
    fails_somewhere("nothing goes on", rings_always=False, losses=6)
