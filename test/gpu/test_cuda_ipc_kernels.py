"""The kernels of the one-sided exchange, both sides in one process."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from one_sided import (
    LAYER_IDS,
    Rank,
    attached_slab,
    make_rows,
    make_shape,
    member,
    reference,
    send,
    weigh,
)

from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.cuda_ipc.layout import LinkWord, WaitPolicy
from sglang_afd.transport.cuda_ipc.slab import Slab

pytestmark = pytest.mark.gpu(1)

POLICIES = [WaitPolicy.POLL, WaitPolicy.MEMOP]
DTYPES = ["bfloat16", "float16", "float32"]


def _is_done(stream: torch.cuda.Stream, limit_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not stream.query():
        if time.monotonic() > deadline_s:
            return False
    return True


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_rows_go_there_and_their_sums_come_back(
    dtype: str, num_rows: int, policy: WaitPolicy
) -> None:
    shape = make_shape(dtype)
    rank = Rank(shape, weigh)
    slab, (index,) = attached_slab(shape, [rank], policy)
    inputs = make_rows(shape, num_rows, seed=num_rows)

    send(slab, 1, 4, inputs, step=(7 << 32) + 3)
    header = rank.heard(index)[0]
    rank.serve(4, [member(index, 1, num_rows)], bucket=64)
    total = slab.combine(1, num_rows)

    torch.cuda.synchronize()
    assert torch.equal(total, reference(inputs))
    assert (header.step, header.layer_id, header.micro_batch_id) == ((7 << 32) + 3, 4, 1)
    assert (header.epoch, header.num_rows) == (5, num_rows)
    assert rank.table.seq_of_next(index, header.micro_batch_id, is_served=False) == 2
    assert rank.exchange.num_done == 1 and rank.exchange.error is None


def test_partial_sums_of_two_ranks_are_added_in_rank_order_and_float32() -> None:
    shape = make_shape()
    ranks = [Rank(shape, weigh, rank=rank, num_ranks=2) for rank in range(2)]
    slab, indices = attached_slab(shape, ranks)
    inputs = make_rows(shape, 33, seed=1)

    send(slab, 0, 3, inputs)
    for rank, index in zip(ranks, indices, strict=True):
        rank.heard(index)
        rank.serve(3, [member(index, 0, 33)], bucket=48)
    total = slab.combine(0, 33)

    torch.cuda.synchronize()
    parts = [reference(inputs, rank=rank, num_ranks=2).float() for rank in range(2)]
    assert torch.equal(total, (parts[0] + parts[1]).bfloat16())


def test_one_unit_takes_the_rows_of_many_peers_and_counts_their_choices() -> None:
    shape = make_shape()
    rank = Rank(shape, weigh)
    slabs, inputs, members = [], [], []
    for number, num_rows in enumerate((5, 1, 30)):
        slab, (index,) = attached_slab(shape, [rank])
        slabs.append(slab)
        inputs.append(make_rows(shape, num_rows, seed=number))
        members.append(member(index, 0, num_rows))
        send(slab, 0, 7, inputs[-1])
        rank.heard(index)

    rank.serve(7, members, bucket=64)
    totals = [slab.combine(0, each.num_rows) for slab, each in zip(slabs, members, strict=True)]

    torch.cuda.synchronize()
    assert all(torch.equal(t, reference(i)) for t, i in zip(totals, inputs, strict=True))
    ids = torch.cat([each[1] for each in inputs])
    expected = torch.bincount(ids[ids >= 0], minlength=16)
    assert torch.equal(rank.exchange.expert_counts[LAYER_IDS.index(7)], expected)
    assert rank.exchange.expert_counts.sum() == expected.sum()


def test_rows_beyond_those_of_the_step_never_leave() -> None:
    shape = make_shape()
    rank = Rank(shape, weigh)
    slab, (index,) = attached_slab(shape, [rank])
    states, ids, weights = make_rows(shape, 40, seed=2)
    states[10:] = float("nan")  # the padding of a graph's bucket

    slab.stage_step(step=1, kind=Kind.DECODE, num_micro_batches=2, num_rows=26)
    slab.dispatch(1, 3, states, ids, weights, first_row=16, rings=True)
    header = rank.heard(index)[0]
    rank.serve(3, [member(index, 1, 10)], bucket=16)
    total = slab.combine(1, 40)

    torch.cuda.synchronize()
    assert header.num_rows == 10 and header.num_micro_batches == 2
    assert torch.equal(total[:10], reference((states[:10], ids[:10], weights[:10])))
    assert not total[10:].isnan().any()


def test_a_large_exchange_is_served_in_pieces_and_answered_after_the_last() -> None:
    shape = make_shape()
    rank = Rank(shape, weigh)
    slab, (index,) = attached_slab(shape, [rank])
    inputs = make_rows(shape, 64, seed=3)
    send(slab, 0, 3, inputs)
    rank.heard(index)
    waiting = torch.cuda.current_stream()
    total = slab.combine(0, 64)

    for first_row, num_rows in ((0, 48), (48, 16)):
        assert not waiting.query()
        with torch.cuda.stream(rank.stream):
            rank.exchange.submit(
                3,
                [member(index, 0, 64)],
                first_row=first_row,
                num_rows=num_rows,
                is_last_piece=first_row == 48,
            )
            rank.run(48)
        rank.stream.synchronize()

    torch.cuda.synchronize()
    assert torch.equal(total, reference(inputs))


@pytest.mark.parametrize("policy", POLICIES)
def test_captured_steps_exchange_nothing_while_detached_and_everything_once_attached(
    policy: WaitPolicy,
) -> None:
    shape = make_shape()
    rank = Rank(shape, weigh)
    slab = Slab(shape, 0, policy)
    inputs = make_rows(shape, 16, seed=4)
    step = torch.cuda.CUDAGraph()
    states = inputs[0].clone()
    with torch.cuda.graph(step):
        for layer_id in LAYER_IDS:
            slab.dispatch(0, layer_id, states, *inputs[1:], rings=layer_id == LAYER_IDS[0])
            states = slab.combine(0, 16) * 0.125
    step.replay()
    torch.cuda.synchronize()  # detached: waits for nobody
    unit = torch.cuda.CUDAGraph()
    with torch.cuda.graph(unit, stream=rank.stream):
        rank.run(16)
    index = rank.open(slab, 9)
    slab.attach(9, 1)

    for number in range(3):
        slab.stage_step(step=number, kind=Kind.DECODE, num_micro_batches=1, num_rows=16)
        step.replay()
        rank.heard(index)
        for layer_id in LAYER_IDS:
            with torch.cuda.stream(rank.stream):
                rank.exchange.submit(layer_id, [member(index, 0, 16)])
                unit.replay()
        torch.cuda.synchronize()

    expected = inputs[0]
    for _ in LAYER_IDS:
        expected = reference((expected, *inputs[1:])) * 0.125
    assert torch.equal(states, expected)
    assert rank.exchange.error is None and rank.exchange.num_done == 9


@pytest.mark.parametrize("policy", POLICIES)
def test_an_abort_ends_the_wait_and_nothing_is_sent_until_attached_again(
    policy: WaitPolicy,
) -> None:
    shape = make_shape()
    rank = Rank(shape, weigh)
    slab, (index,) = attached_slab(shape, [rank], policy)
    stream = torch.cuda.Stream()
    inputs = make_rows(shape, 8, seed=5)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        send(slab, 0, 3, inputs)
        slab.combine(0, 8)
    rank.heard(index)
    assert not _is_done(stream, 0.2)

    slab.abort()

    assert _is_done(stream)
    with torch.cuda.stream(stream):
        send(slab, 0, 4, inputs)
        slab.combine(0, 8)
    assert _is_done(stream) and not rank.table.rung(index)
    slab.detach()
    assert slab.link is LinkWord.DETACHED


@pytest.mark.parametrize("policy", POLICIES)
def test_a_new_rank_serves_what_the_lost_one_left(policy: WaitPolicy) -> None:
    shape = make_shape()
    lost, new = Rank(shape, weigh), Rank(shape, weigh)
    slab, (at_lost,) = attached_slab(shape, [lost], policy)
    stream = torch.cuda.Stream()
    inputs = make_rows(shape, 8, seed=6)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        send(slab, 0, 3, inputs)
        total = slab.combine(0, 8)
    lost.heard(at_lost)

    index = new.open(slab, 6)
    slab.attach(6, 1)
    header = new.heard(index)[0]
    lost.serve(3, [member(at_lost, 0, 8)], bucket=8)  # too late: its epoch is over
    lost.stream.synchronize()
    was_waiting = not _is_done(stream, 0.2)
    new.serve(3, [member(index, 0, 8)], bucket=8)

    assert _is_done(stream)
    assert was_waiting and header.epoch == 6
    assert torch.equal(total, reference(inputs))


def test_rows_that_leave_while_servers_attach_anew_are_heard_of_once() -> None:
    shape = make_shape()
    rank = Rank(shape, weigh)
    slab, (index,) = attached_slab(shape, [rank])
    stream = torch.cuda.Stream()
    inputs = make_rows(shape, 8, seed=12)
    expected = reference(inputs)
    torch.cuda.synchronize()

    for epoch in range(100, 300):
        before, index = index, rank.open(slab, epoch)
        rank.table.mark_dead(before)
        rank.table.close(before)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(epoch % 50 * 2000)  # 0 to 50 us, so that the two meet
            send(slab, 0, 3, inputs)
            total = slab.combine(0, 8)
        slab.attach(epoch, 1)
        heard = []
        while not heard:
            heard = [header for header in rank.heard(index) if header.epoch == epoch]
        rank.serve(3, [member(index, 0, 8)], bucket=8)

        assert _is_done(stream) and rank.exchange.error is None
        assert torch.equal(total, expected)
        assert len(heard) == 1 and not rank.table.rung(index)


def test_nothing_waits_for_a_peer_that_is_marked_dead() -> None:
    shape = make_shape()
    rank = Rank(shape, weigh)
    living, (at_living,) = attached_slab(shape, [rank])
    dead, (at_dead,) = attached_slab(shape, [rank])
    inputs = make_rows(shape, 8, seed=7)
    for slab, index in ((living, at_living), (dead, at_dead)):
        send(slab, 0, 3, inputs)
        rank.heard(index)
    rank.serve(3, [member(at_dead, 0, 8), member(at_living, 0, 8)], bucket=16)
    living.combine(0, 8)
    torch.cuda.synchronize()
    send(living, 0, 4, inputs)
    rank.serve(4, [member(at_dead, 0, 8), member(at_living, 0, 8)], bucket=16)
    assert not _is_done(rank.stream, 0.2)

    rank.table.mark_dead(at_dead)

    assert _is_done(rank.stream)
    total = living.combine(0, 8)
    torch.cuda.synchronize()
    assert torch.equal(total, reference(inputs)) and rank.exchange.num_done == 2
    rank.table.close(at_dead)


def test_peers_come_and_go_while_a_unit_waits_for_another() -> None:
    shape = make_shape()
    rank = Rank(shape, weigh)
    slab, (index,) = attached_slab(shape, [rank])
    going, (at_going,) = attached_slab(shape, [rank])
    coming = Slab(shape, 0, WaitPolicy.POLL)
    inputs = make_rows(shape, 8, seed=13)
    send(slab, 0, 3, inputs)
    rank.heard(index)
    rank.serve(3, [member(index, 0, 8)], bucket=8)
    slab.combine(0, 8)
    torch.cuda.synchronize()
    rank.serve(4, [member(index, 0, 8)], bucket=8)  # foreseen; its rows come below
    assert not _is_done(rank.stream, 0.2)

    def come_and_go() -> None:
        rank.table.mark_dead(at_going)
        rank.table.close(at_going)
        rank.open(coming, 6)

    thread = threading.Thread(target=come_and_go, daemon=True)
    thread.start()
    thread.join(5.0)
    is_held_up, is_waiting = thread.is_alive(), not rank.stream.query()
    send(slab, 0, 4, inputs)  # ends the wait in any case

    assert _is_done(rank.stream)
    assert is_waiting and not is_held_up
    going.close()


def test_rows_of_another_layer_than_the_unit_are_told_and_not_answered() -> None:
    shape = make_shape()
    rank = Rank(shape, weigh)
    slab, (index,) = attached_slab(shape, [rank])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        send(slab, 0, 3, make_rows(shape, 8, seed=8))
        slab.combine(0, 8)
    rank.heard(index)

    rank.serve(4, [member(index, 0, 8)], bucket=8)
    rank.stream.synchronize()

    assert "has rows for layer 3, expected those for layer 4" in (rank.exchange.error or "")
    assert not _is_done(stream, 0.2)
    slab.abort()
    assert _is_done(stream)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_fp8_come_within_half_a_step_of_e4m3(dtype: str) -> None:
    shape = make_shape(dtype, is_fp8=True, hidden_size=384)
    rank = Rank(shape, lambda states, ids, weights: states.clone())
    slab, (index,) = attached_slab(shape, [rank])
    inputs = make_rows(shape, 32, seed=9)
    inputs[0][3] *= 1e-3
    inputs[0][4] = 0

    send(slab, 0, 3, inputs)
    rank.heard(index)
    rank.serve(3, [member(index, 0, 32)], bucket=32)
    got = slab.combine(0, 32)

    torch.cuda.synchronize()
    wanted = inputs[0].float().view(32, 3, 128)
    error = (got.float().view(32, 3, 128) - wanted).abs()
    largest = wanted.abs().amax(2, keepdim=True)
    # Three bits of mantissa: half a step is 2^-4 of a value; near zero, of the smallest step. The
    # model's own dtype rounds once more.
    bound = wanted.abs() * (2**-4 + 2**-8) + largest / 448 * 2**-9
    assert (error <= bound).all(), (error - bound).max()
    assert error.max() > 0
