"""The rules of the rounds over thousands of random schedules of plain peers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from round_peers import RuleBroken, Scenario, World

from sglang_afd.rounds.decode import DecodeQueue
from sglang_afd.rounds.formation import Formation
from sglang_afd.rounds.peer_state import FIRST, PeerState, Place, Position
from sglang_afd.rounds.rounds import Rounds

NUM_PLAIN_SCHEDULES = 1600
NUM_TRIES = 400  # a planted fault must show within so many schedules


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    num_peers = draw(st.integers(1, 16))
    chance = st.sampled_from((0.0, 0.1, 0.4))
    return Scenario(
        seed=draw(st.integers(0, 2**32)),
        num_peers=num_peers,
        num_ranks=draw(st.integers(1, 4)),
        num_layers=draw(st.integers(1, 4)),
        max_micro_batches=draw(st.integers(1, 4)),
        num_steps=draw(st.integers(1, 3)),
        prefill=draw(chance),
        zero_rows=draw(chance),
        lost_intent=draw(st.sampled_from((0.0, 0.3, 1.0))),
        false_intent=draw(chance),
        idle=draw(chance),
        stall=draw(chance),
        cut=draw(chance),
        relink=draw(chance),
        crashes=draw(st.integers(0, num_peers)),
        late_peers=draw(st.integers(0, num_peers)),
    )


def plain_scenario(seed: int) -> Scenario:
    random = Random(seed)
    num_peers = random.choice((1, 2, 3, 4, 5, 8, 16))
    return Scenario(
        seed=seed,
        num_peers=num_peers,
        num_ranks=random.randint(1, 4),
        num_layers=random.randint(1, 5),
        max_micro_batches=random.randint(1, 4),
        num_steps=random.randint(1, 4),
        crashes=random.randint(0, num_peers // 2),
        late_peers=random.randint(0, num_peers // 2),
    )


@settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(scenarios())
def test_no_schedule_breaks_a_rule(scenario: Scenario) -> None:
    World(scenario).run()


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))]
)
def test_no_schedule_of_usual_trouble_breaks_a_rule(part: int) -> None:
    seeds = range(part, NUM_PLAIN_SCHEDULES, 4)

    served = [World(plain_scenario(seed)).run().served for seed in seeds]

    assert sum(served) > 100 * len(served)


class CommitsFromIntents(DecodeQueue):
    """Takes along whoever announced a step, though no row of it is here."""

    def _who_starts(self, position: Position) -> list[PeerState]:
        others = []
        if position == FIRST:
            others = [
                state
                for state in self._peers.values()
                if state.place is Place.AWAY and state.announced is not None
            ]
        for state in others:
            state.micro_batch_ids = {0}
        return super()._who_starts(position) + others


class DeafToWithdrawals(Rounds):
    def withdrawn(self, peer: object, now_s: float) -> None:
        pass


class NeverGivesUp(Formation):
    def _give_up(self, missing: list[PeerState]) -> None:
        pass


class KeepsTheGone(Rounds):
    def peer_gone(self, peer: object, now_s: float) -> None:
        pass


class ExpectsThePrefilling(Rounds):
    @property
    def expected(self) -> list[object]:
        return [
            state.peer for state in self._peers.values() if state.is_prefilling or state.is_expected
        ]


class BoardsOutOfOrder(DecodeQueue):
    """Takes a parked peer aboard at any of its micro-batches."""

    def _riders(self, position: Position) -> list[PeerState]:
        return [
            state
            for state in self._peers.values()
            if state.place is Place.ASIDE and state.is_at(position)
        ]


class ForgetsTheParked(Formation):
    def _start_aside(self, now_s: float) -> Position | None:
        return None


class ForgetsWhatIsOutOfPlace(DecodeQueue):
    def _find_out_of_place(self, state: PeerState) -> None:
        pass


Part = type[Rounds] | type[DecodeQueue] | type[Formation]


def runs(part: Part) -> Callable[[int], World]:
    """One schedule under a leader that has this part instead of its own."""

    def make_leader(layer_ids: list[int]) -> Rounds:
        if issubclass(part, Rounds):
            return part(layer_ids)
        leader = Rounds(layer_ids)
        if issubclass(part, DecodeQueue):
            leader._decode.__class__ = part
        else:
            leader._decode._formation.__class__ = part
        return leader

    return lambda seed: World(plain_scenario(seed), make_leader).run()


FAULTS: dict[str, Callable[[int], World]] = {
    "commits from intents": runs(CommitsFromIntents),
    "deaf to withdrawals": runs(DeafToWithdrawals),
    "never gives up": runs(NeverGivesUp),
    "keeps the gone": runs(KeepsTheGone),
    "expects the prefilling": runs(ExpectsThePrefilling),
    "boards out of order": runs(BoardsOutOfOrder),
    "forgets the parked": runs(ForgetsTheParked),
    "forgets what is out of place": runs(ForgetsWhatIsOutOfPlace),
    "each rank forms rounds of its own": lambda seed: World(
        plain_scenario(seed), make_follower=Rounds
    ).run(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_a_rule(fault: str) -> None:
    broken = None

    for seed in range(NUM_TRIES):
        try:
            FAULTS[fault](seed)
        except RuleBroken as error:
            broken = error
            break

    assert broken is not None, f"{NUM_TRIES} schedules did not notice: {fault}"
