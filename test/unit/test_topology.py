from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.errors import ConfigError
from sglang_afd.topology import ExpertShard, check_coverage


def shards(num_experts: int, ep_size: int) -> list[ExpertShard]:
    return [
        ExpertShard(rank=rank, ep_size=ep_size, num_experts=num_experts) for rank in range(ep_size)
    ]


def spans(num_experts: int, ep_size: int) -> list[tuple[int, int]]:
    return [(shard.first, shard.stop) for shard in shards(num_experts, ep_size)]


@pytest.mark.parametrize(
    ("num_experts", "ep_size", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 8)]),
        (8, 3, [(0, 3), (3, 6), (6, 8)]),
        (7, 2, [(0, 4), (4, 7)]),
        (60, 7, [(0, 9), (9, 18), (18, 27), (27, 36), (36, 45), (45, 54), (54, 60)]),
        (2, 2, [(0, 1), (1, 2)]),
    ],
)
def test_experts_are_shared_out_contiguously(
    num_experts: int, ep_size: int, expected: list[tuple[int, int]]
) -> None:
    assert spans(num_experts, ep_size) == expected


def test_places_beyond_the_experts_are_phantom() -> None:
    last = ExpertShard(rank=2, ep_size=3, num_experts=7)

    assert (last.num_local, last.num_padded, last.first, last.stop) == (3, 9, 6, 7)


@given(num_experts=st.integers(1, 512), data=st.data())
def test_every_split_covers_every_expert_once_with_equal_places(
    num_experts: int, data: st.DataObject
) -> None:
    ep_size = data.draw(st.integers(1, num_experts))
    if (ep_size - 1) * -(-num_experts // ep_size) >= num_experts:
        with pytest.raises(ConfigError, match="would own none"):
            shards(num_experts, ep_size)
        return

    ranks = shards(num_experts, ep_size)

    check_coverage(((shard.first, shard.stop) for shard in ranks), num_experts)
    assert {shard.num_local for shard in ranks} == {ranks[0].num_padded // ep_size}
    assert all(1 <= shard.stop - shard.first <= shard.num_local for shard in ranks)
    assert 0 <= ranks[0].num_padded - num_experts < ep_size


@pytest.mark.parametrize(
    ("num_experts", "ep_size", "first_empty"), [(4, 3, 2), (8, 5, 4), (1, 2, 1), (6, 7, 6)]
)
def test_a_rank_that_would_own_nothing_is_refused(
    num_experts: int, ep_size: int, first_empty: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        shards(num_experts, ep_size)

    assert f"rank {first_empty} of --ep-size {ep_size} would own none" in str(caught.value)
    assert f"{num_experts} experts" in str(caught.value)
    assert "use fewer MLP ranks" in str(caught.value)


@pytest.mark.parametrize(("rank", "ep_size"), [(-1, 2), (2, 2), (0, 0), (0, -1)])
def test_a_rank_outside_the_group_is_refused(rank: int, ep_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"--afd-ep-rank {rank} does not fit --ep-size"):
        ExpertShard(rank=rank, ep_size=ep_size, num_experts=8)


@given(ranges=st.permutations(spans(60, 7)))
def test_coverage_does_not_depend_on_the_order_of_ranks(ranges: list[tuple[int, int]]) -> None:
    check_coverage(ranges, 60)


@given(missing=st.integers(0, 6))
def test_a_missing_rank_is_found(missing: int) -> None:
    ranges = spans(60, 7)
    del ranges[missing]

    with pytest.raises(ConfigError, match=r"start the missing rank"):
        check_coverage(ranges, 60)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 2), (4, 6)], "no MLP rank owns experts 2 to 3"),
        ([(1, 6)], "no MLP rank owns experts 0 to 0"),
        ([(0, 4), (3, 6)], "expert 3 is owned by two MLP ranks"),
        ([(0, 6), (0, 6)], "expert 0 is owned by two MLP ranks"),
        ([(0, 4)], "cover 4 of 6 experts"),
        ([(0, 8)], "cover 8 of 6 experts"),
        ([], "cover 0 of 6 experts"),
    ],
)
def test_a_gap_an_overlap_and_a_wrong_end_are_named(
    ranges: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_coverage(ranges, 6)
