"""Rows go out, the sum of every rank's share comes back."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peers import make_spec
from torch import Tensor
from traffic import SEED, dispatch, exchange, random_rows, rows_to
from transports import Fleet, ReferenceExperts

from sglang_afd.errors import CapacityError
from sglang_afd.transport.base import Arrived


@pytest.mark.parametrize("num_links", [1, 2, 3])
@pytest.mark.parametrize("ep_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_link_gets_the_sum_over_every_rank_bit_by_bit(
    fleet: Fleet, num_links: int, ep_size: int, dtype: str
) -> None:
    spec = make_spec(dtype=dtype, hidden_size=8)  # rows of 16 bytes at least
    experts = ReferenceExperts(spec, ep_size, SEED)
    fleet.start(spec, experts.run, ep_size)
    links = [fleet.attach(spec) for _ in range(num_links)]

    def steps(index: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(SEED + index)
        pairs = []
        for step in range(2):
            for layer_id in spec.moe_layer_ids:
                rows = random_rows(spec, 1 + (step + layer_id + index) % spec.max_rows, generator)
                got = exchange(links[index], rows, step=step, layer_id=layer_id)
                pairs.append((got, experts.expected(layer_id, rows)))
        return pairs

    with ThreadPoolExecutor(num_links) as pool:
        results = list(pool.map(steps, range(num_links)))

    for index, pairs in enumerate(results):
        for place, (got, expected) in enumerate(pairs):
            where = f"link {index}, exchange {place}, seed {SEED}"
            torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=where)


def test_two_micro_batches_are_in_flight_at_once_and_come_back_in_any_order(
    fleet: Fleet,
) -> None:
    spec = make_spec()
    experts = ReferenceExperts(spec, 2, SEED)
    fleet.start(spec, experts.run, 2)
    link = fleet.attach(spec)
    a, b = rows_to(spec, 0), rows_to(spec, 5)
    dispatch(link, a, micro_batch_id=0)
    dispatch(link, b, micro_batch_id=1)

    of_b, of_a = link.combine(1), link.combine(0)

    assert torch.equal(of_a, experts.expected(1, a))
    assert torch.equal(of_b, experts.expected(1, b))


def test_a_rank_without_a_matching_row_adds_nothing(fleet: Fleet) -> None:
    spec = make_spec()
    experts = ReferenceExperts(spec, 3, SEED)
    ranks = fleet.start(spec, experts.run, 3)
    rows = rows_to(spec, 0)

    got = exchange(fleet.attach(spec), rows)

    assert torch.equal(got, experts.run(0, 1, rows))
    assert [len(rank.served) for rank in ranks] == [1, 1, 1]


def test_choices_that_go_nowhere_come_back_as_zero(fleet: Fleet) -> None:
    spec = make_spec()
    fleet.start(spec, ReferenceExperts(spec, 2, SEED).run, 2)

    got = exchange(fleet.attach(spec), rows_to(spec, -1))

    assert torch.equal(got, torch.zeros(2, spec.hidden_size))


def test_the_agreed_number_of_rows_fits_and_one_more_does_not(fleet: Fleet) -> None:
    spec = make_spec()
    experts = ReferenceExperts(spec, 1, SEED)
    [rank] = fleet.start(spec, experts.run)
    link = fleet.attach(spec)
    rows = rows_to(spec, 3, spec.max_rows)

    with pytest.raises(CapacityError, match="6 rows in one exchange; 1 to 5 fit"):
        dispatch(link, rows_to(spec, 3, spec.max_rows + 1))
    got = exchange(link, rows)

    assert torch.equal(got, experts.expected(1, rows))
    assert len(rank.served) == 1
    assert link.lost is None


def test_the_payload_is_kept_until_the_last_rank_has_replied(fleet: Fleet) -> None:
    spec = make_spec(max_rows=4096, hidden_size=64)
    experts = ReferenceExperts(spec, 2, SEED)
    ranks = fleet.start(spec, experts.run, 2)
    link = fleet.attach(spec)
    rows = random_rows(spec, 64, torch.Generator().manual_seed(SEED))
    expected = experts.expected(1, rows)
    ranks[1].pause()

    dispatch(link, rows)
    del rows
    gc.collect()
    junk = [torch.full((64, 64), float("nan")) for _ in range(32)]
    ranks[0].wait_for(Arrived)
    ranks[1].resume()

    torch.testing.assert_close(link.combine(0), expected, rtol=0, atol=0, msg=f"seed {SEED}")
    del junk


def test_partial_sums_are_added_in_rank_order_whoever_replies_first(fleet: Fleet) -> None:
    spec = make_spec()
    values = (1e8, -1e8, 1.0)  # in any other order the sum is 0
    ranks = fleet.start(
        spec, lambda rank, layer_id, rows: torch.full_like(rows.hidden_states, values[rank]), 3
    )
    link = fleet.attach(spec)
    ranks[0].pause()
    dispatch(link, rows_to(spec, 0))
    for rank in ranks[1:]:
        rank.wait_for(Arrived)
    ranks[0].wait_for(Arrived)
    ranks[0].resume()

    assert link.combine(0).unique().tolist() == [1.0]


def test_the_ranks_of_a_link_are_told_in_order(fleet: Fleet) -> None:
    spec = make_spec()
    fleet.start(spec, ReferenceExperts(spec, 3, SEED).run, 3)

    link = fleet.attach(spec)

    assert [answer.rank for answer in link.ranks] == [0, 1, 2]
    assert [(answer.first_expert, answer.stop_expert) for answer in link.ranks] == [
        (0, 2),
        (2, 4),
        (4, 6),
    ]
    assert {answer.epoch for answer in link.ranks} == {link.epoch}
