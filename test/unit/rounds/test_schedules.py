"""The rules of the rounds over thousands of random schedules of plain peers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from round_peers import RuleBroken, Scenario, World

from sglang_afd.rounds.flight import Flight
from sglang_afd.rounds.peer_state import FIRST, PeerState, Place, Position
from sglang_afd.rounds.rounds import Rounds

NUM_PLAIN_SCHEDULES = 800
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
    max_examples=600,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(scenarios())
def test_no_schedule_breaks_a_rule(scenario: Scenario) -> None:
    World(scenario).run()


@pytest.mark.parametrize("part", range(4))
def test_no_schedule_of_usual_trouble_breaks_a_rule(part: int) -> None:
    seeds = range(part, NUM_PLAIN_SCHEDULES, 4)

    served = [World(plain_scenario(seed)).run().served for seed in seeds]

    assert sum(served) > 100 * len(served)


class CommitsFromIntents(Rounds):
    """Takes along whoever announced a step, though no row of it is here."""

    def _start(self, now_s: float) -> Flight | None:
        flight = super()._start(now_s)
        if flight is not None and flight.position == FIRST:
            for state in self._peers.values():
                if state.place is Place.AWAY and state.announced is not None:
                    state.micro_batch_ids = {0}
                    flight.board(state)
        return flight


class DeafToWithdrawals(Rounds):
    def withdrawn(self, peer: object, now_s: float) -> None:
        pass


class NeverGivesUp(Rounds):
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


class BoardsOutOfOrder(Rounds):
    """Takes a parked peer aboard at any of its micro-batches."""

    def _at(self, position: Position) -> list[PeerState]:
        return [
            state
            for state in self._peers.values()
            if state.place is Place.ASIDE and state.is_at(position)
        ]


class ForgetsTheParked(Rounds):
    def _at(self, position: Position) -> list[PeerState]:
        return []

    def _start_aside(self, now_s: float) -> Flight | None:
        return None


class ForgetsWhatIsOutOfPlace(Rounds):
    def _find_out_of_place(self, state: PeerState) -> None:
        pass


def runs(make_leader: type[Rounds]) -> Callable[[int], World]:
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
