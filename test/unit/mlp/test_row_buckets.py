from __future__ import annotations

import pytest

from sglang_afd.mlp.device_plan import parts_of
from sglang_afd.mlp.row_buckets import RowBuckets, graph_rows
from sglang_afd.rounds.units import Member, Unit


@pytest.mark.parametrize(("listed", "max_rows"), [((), 2048), ((8, 64), 300), ((8, 512), 256)])
def test_every_number_of_rows_has_a_size_that_holds_it(listed: list[int], max_rows: int) -> None:
    buckets = RowBuckets(graph_rows(listed, max_rows), max_rows)

    sizes = [buckets.fit(num_rows) for num_rows in range(max_rows + 1)]

    assert all(size >= num_rows for num_rows, size in enumerate(sizes))
    assert set(sizes) <= {*buckets.captured, *buckets.eager}
    assert max(sizes) <= max_rows


def test_graphs_are_captured_for_what_is_listed() -> None:
    buckets = RowBuckets(graph_rows((64, 16), 100), 100)

    assert buckets.captured == (16, 64)


def test_without_graphs_the_usual_sizes_run_eagerly() -> None:
    buckets = RowBuckets((), 2048)

    assert (buckets.captured, buckets.fit(9)) == ((), 16)


def unit(*rows: int) -> Unit:
    members = [
        Member(peer=number, micro_batch_id=0, step=1, layer_id=0, num_rows=num_rows)
        for number, num_rows in enumerate(rows)
    ]
    return Unit(layer_id=0, members=members, num_rows=sum(rows))


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ((5,), [[5]]),
        ((60, 40), [[60, 40]]),
        ((60, 41), [[60], [41]]),
        ((100, 100, 1), [[100], [100], [1]]),
        ((0, 100, 0), [[0, 100, 0]]),
    ],
)
def test_a_unit_is_cut_where_the_staging_buffers_end(
    rows: tuple[int, ...], parts: list[list[int]]
) -> None:
    found = parts_of(unit(*rows), 100)

    assert [[member.num_rows for member in part] for part in found] == parts
