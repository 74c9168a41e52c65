from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.rounds import choice
from sglang_afd.rounds.choice import Fixed, Measured, build_choice

Clock = Callable[[int, int], float]  # rows, micro-batches -> seconds of the step


def drive(
    chooser: Measured, clock: Clock, num_steps: int, num_rows: int = 64, *, is_prefill: bool = False
) -> list[int]:
    chosen = []
    for _ in range(num_steps):
        number = chooser.choose(num_rows, is_prefill=is_prefill)
        chooser.observe(num_rows, number, clock(num_rows, number), is_prefill=is_prefill)
        chosen.append(number)
    return chosen


def faster_with(best: int) -> Clock:
    return lambda num_rows, number: 0.010 if number == best else 0.013


@pytest.mark.parametrize("best", [1, 2])
def test_it_keeps_to_the_faster_number(best: int) -> None:
    chosen = drive(Measured(), faster_with(best), 400)

    assert chosen[-300:].count(best) == 300


def test_four_are_tried_and_kept_where_they_are_faster_still() -> None:
    chosen = drive(Measured(), lambda num_rows, number: 0.1 / number, 400)

    assert chosen[-300:] == [4] * 300


def test_four_are_not_even_tried_where_two_are_slower_than_one() -> None:
    chosen = drive(Measured(), lambda num_rows, number: 0.01 * number, 2000)

    assert 4 not in chosen


def test_it_follows_a_change_to_the_worse() -> None:
    chooser = Measured()
    drive(chooser, faster_with(2), 200)

    chosen = drive(chooser, faster_with(1), 200)

    assert chosen[-100:] == [1] * 100


def test_it_follows_a_change_to_the_better_at_the_next_look() -> None:
    chooser = Measured()
    drive(chooser, lambda num_rows, number: {1: 0.010}.get(number, 0.013), 200)

    chosen = drive(
        chooser,
        lambda num_rows, number: {1: 0.010, 2: 0.006}.get(number, 0.013),
        2 * choice.PROBE_AGAIN_STEPS,
    )

    assert chosen[-100:] == [2] * 100


def test_looks_at_other_numbers_are_rare() -> None:
    chooser = Measured()
    drive(chooser, faster_with(1), 100)

    chosen = drive(chooser, faster_with(1), 10_000)

    assert 0 < chosen.count(2) < 100


def test_looks_are_bounded_however_much_the_times_jump() -> None:
    jumps = random.Random(4)

    chosen = drive(Measured(), lambda num_rows, number: number * jumps.choice([1, 9]), 10_000)

    assert chosen.count(1) > 8000


def test_a_small_difference_changes_nothing() -> None:
    clock: Clock = lambda num_rows, number: 0.0100 if number == 1 else 0.0097  # noqa: E731

    chosen = drive(Measured(), clock, 400)

    assert chosen[-300:] == [1] * 300


def test_one_odd_step_changes_nothing() -> None:
    chooser = Measured()
    drive(chooser, faster_with(2), 200)

    chooser.observe(64, 2, 5.0, is_prefill=False)

    assert chooser.choose(64, is_prefill=False) == 2


def test_noise_does_not_hide_which_is_faster() -> None:
    noise = random.Random(3)
    clock = faster_with(2)

    chosen = drive(Measured(), lambda *step: clock(*step) * noise.uniform(0.9, 1.1), 2000)

    assert chosen[-1000:].count(2) > 900


def test_sizes_and_kinds_are_learnt_apart() -> None:
    chooser = Measured()

    drive(chooser, faster_with(1), 100, num_rows=8)
    drive(chooser, faster_with(2), 100, num_rows=256)
    drive(chooser, faster_with(1), 100, num_rows=256, is_prefill=True)

    assert chooser.choose(8, is_prefill=False) == 1
    assert chooser.choose(256, is_prefill=False) == 2
    assert chooser.choose(256, is_prefill=True) == 1


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 600), st.booleans(), st.floats(1e-4, 1.0)), max_size=200
    )
)
def test_no_micro_batch_is_a_sliver_whatever_was_measured(
    steps: list[tuple[int, bool, float]],
) -> None:
    chooser = Measured()

    for num_rows, is_prefill, duration_s in steps:
        number = chooser.choose(num_rows, is_prefill=is_prefill)
        chooser.observe(num_rows, number, duration_s, is_prefill=is_prefill)

        least = choice.MIN_ROWS_PREFILL if is_prefill else choice.MIN_ROWS_DECODE
        assert number == 1 or num_rows // number >= least


def test_one_row_is_one_micro_batch() -> None:
    assert Measured().choose(1, is_prefill=False) == 1
    assert Fixed(4).choose(1, is_prefill=False) == 1


def test_asking_changes_nothing() -> None:
    asked, other = Measured(), Measured()

    for chooser, num_questions in ((asked, 50), (other, 1)):
        for _ in range(20):
            for _ in range(num_questions):
                number = chooser.choose(64, is_prefill=False)
            chooser.observe(64, number, 0.01 * number, is_prefill=False)

    assert asked.choose(64, is_prefill=False) == other.choose(64, is_prefill=False)


def test_a_fixed_number_is_kept_whatever_was_measured() -> None:
    fixed = build_choice("3")

    fixed.observe(64, 3, 9.0, is_prefill=False)

    assert [fixed.choose(rows, is_prefill=False) for rows in (2, 3, 64)] == [2, 3, 3]


def test_auto_measures() -> None:
    assert isinstance(build_choice("auto"), Measured)
