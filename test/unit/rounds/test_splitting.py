from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.rounds.splitting import SMALLEST_SHARE, Part, split

steps = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def sizes(parts: list[Part]) -> list[int]:
    return [part.num_rows for part in parts]


@given(rows=steps, num_parts=st.integers(1, 4), may_cut_inside=st.booleans())
def test_every_row_of_every_sequence_is_in_exactly_one_part_and_in_order(
    rows: list[int], num_parts: int, may_cut_inside: bool
) -> None:
    parts = split(rows, num_parts, may_cut_inside=may_cut_inside)

    seen = [
        (sequence, offset)
        for part in parts
        for sequence, first, length in pieces(part, rows)
        for offset in range(first, first + length)
    ]
    assert seen == [(sequence, at) for sequence, count in enumerate(rows) for at in range(count)]


def pieces(part: Part, rows: list[int]) -> list[tuple[int, int, int]]:
    """Sequence, first row of it, number of rows."""
    own = part.rows_of_sequences(rows)
    assert sum(own) == part.num_rows
    firsts = [part.num_rows_before, *([0] * (len(own) - 1))]
    sequences = range(part.first_sequence, part.stop_sequence)
    return list(zip(sequences, firsts, own, strict=True))


@given(rows=steps, num_parts=st.integers(1, 4))
def test_parts_that_may_cut_a_sequence_differ_by_one_row_at_most(
    rows: list[int], num_parts: int
) -> None:
    parts = split(rows, num_parts)

    assert len(parts) == min(num_parts, sum(rows))
    assert max(sizes(parts)) - min(sizes(parts)) <= 1


@given(rows=steps, num_parts=st.integers(1, 4))
def test_parts_of_whole_sequences_are_never_slivers(rows: list[int], num_parts: int) -> None:
    parts = split(rows, num_parts, may_cut_inside=False)

    assert 1 <= len(parts) <= num_parts
    assert all(part.num_rows_before == part.num_rows_after == 0 for part in parts)
    assert min(sizes(parts)) >= SMALLEST_SHARE * sum(rows) / len(parts)


def test_a_decode_step_is_halved() -> None:
    first, second = split([1] * 9, 2)

    assert (first.first_row, first.stop_row) == (0, 4)
    assert (second.first_sequence, second.stop_sequence) == (4, 9)
    assert second.rows_of_sequences([1] * 9) == [1] * 5


def test_one_long_prompt_is_cut_inside() -> None:
    first, second = split([7, 93], 2)

    assert first.rows_of_sequences([7, 93]) == [7, 43]
    assert second.rows_of_sequences([7, 93]) == [50]
    assert (second.first_sequence, second.num_rows_before) == (1, 43)


def test_a_prompt_can_be_in_three_parts() -> None:
    parts = split([90], 3)

    assert [(part.num_rows_before, part.num_rows_after) for part in parts] == [
        (0, 60),
        (30, 30),
        (60, 0),
    ]


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_one_row_is_one_part(num_parts: int) -> None:
    assert sizes(split([1], num_parts)) == [1]


def test_fewer_rows_than_parts_make_a_part_each() -> None:
    assert sizes(split([1, 1, 1], 4)) == [1, 1, 1]


def test_a_split_that_leaves_a_sliver_is_not_made() -> None:
    assert sizes(split([1, 1, 98], 2, may_cut_inside=False)) == [100]


def test_fewer_parts_are_made_where_more_would_leave_a_sliver() -> None:
    assert sizes(split([40, 1, 1, 58], 4, may_cut_inside=False)) == [42, 58]


def test_a_sequence_without_rows_disturbs_nothing() -> None:
    parts = split([0, 4, 0, 4, 0], 2)

    assert sizes(parts) == [4, 4]
    assert [part.rows_of_sequences([0, 4, 0, 4, 0]) for part in parts] == [[4], [4]]
