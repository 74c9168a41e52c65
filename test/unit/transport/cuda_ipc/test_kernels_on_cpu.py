"""The kernels of the one-sided exchange and the classes that launch them, on a CPU.

What a GPU adds - memory order, streams, graphs, two processes - is tested in test/gpu.
"""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence

import cuda_on_cpu
import one_sided
import pytest
import torch
from mapped_slab import Mapped
from one_sided import LAYER_IDS, NUM_EXPERTS, Rank, make_rows, make_shape, member, reference, weigh
from torch import Tensor

from sglang_afd.protocol.messages import Dispatch, Kind
from sglang_afd.transport.cuda_ipc import kernels, layout, peer_table, slab, units
from sglang_afd.transport.cuda_ipc.layout import EVERY_ROW, LinkWord, SlabShape, WaitPolicy
from sglang_afd.transport.cuda_ipc.slab import Slab

DTYPES = ["bfloat16", "float16", "float32"]
EPOCH = (3 << 32) + 5
PATIENCE_S = 60.0

Compile = Callable[[str, str], cuda_on_cpu.Kernels]


class Gpu:
    """What stands in for one; compiles for a dtype when that is asked for first."""

    def __init__(self, compile_: Compile) -> None:
        self._compile = compile_
        self.source = cuda_on_cpu.source()
        self.slabs: list[Slab] = []

    def kernels(self, device: int, dtype: str) -> cuda_on_cpu.Kernels:
        """See `kernels.module`."""
        return self._compile(self.source, dtype)

    def slab(self, shape: SlabShape) -> Slab:
        """A slab that nobody is attached to."""
        self.slabs.append(Slab(shape, 0, WaitPolicy.POLL))
        return self.slabs[-1]

    def attached(
        self, shape: SlabShape, ranks: Sequence[Rank] = (), *, num_ranks: int | None = None
    ) -> tuple[Slab, list[int]]:
        """A slab that is attached, and its index at each rank."""
        made = self.slab(shape)
        indices = [rank.open(made, EPOCH) for rank in ranks]
        made.attach(EPOCH, len(ranks) if num_ranks is None else num_ranks)
        return made, indices


@pytest.fixture(scope="session")
def compile_(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    if not shutil.which("g++"):
        pytest.skip("there is no g++ to compile exchange.cu for this CPU")

    @functools.cache
    def compile_once(text: str, dtype: str) -> cuda_on_cpu.Kernels:
        return cuda_on_cpu.Kernels(text, dtype, tmp_path_factory.mktemp("exchange"))

    return compile_once


@pytest.fixture
def gpu(compile_: Compile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu(compile_)
    monkeypatch.setattr(kernels, "module", made.kernels)
    monkeypatch.setattr(kernels, "has_fp8", lambda device: True)
    for room in (slab, peer_table, units):
        monkeypatch.setattr(room, "driver", cuda_on_cpu)
    for room in (slab, peer_table):
        monkeypatch.setattr(room, "own_stream", cuda_on_cpu.own_stream)
    for room in (slab, peer_table, units, one_sided):
        monkeypatch.setattr(room, "torch", cuda_on_cpu.HostTorch())
    yield made
    for each in made.slabs:
        each.close()


def _send(made: Slab, slot: int, layer_id: int, inputs: Sequence[Tensor], *, step: int = 1) -> None:
    made.stage_step(step=step, kind=Kind.DECODE, num_micro_batches=2, num_rows=EVERY_ROW)
    made.dispatch(slot, layer_id, *inputs, rings=True)


def _exchange_to_hear(rank: Rank, made: Slab, index: int, inputs: Sequence[Tensor]) -> None:
    """Slot 0, layer 3, and the rank's host knows of it."""
    _send(made, 0, 3, inputs)
    assert rank.table.rung(index)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_rows_lie_in_their_slot_and_nowhere_else(gpu: Gpu, dtype: str, num_rows: int) -> None:
    made, _ = gpu.attached(make_shape(dtype), num_ranks=1)
    seen, inputs = Mapped(made), make_rows(made.shape, num_rows, seed=num_rows)
    seen.fill(0xA5)
    other = seen.copy()[: made.shape.areas["end"]]

    _send(made, 1, 4, inputs)

    for got, wanted in zip(seen.request(1), inputs, strict=True):
        assert torch.equal(got[:num_rows], wanted)
        assert (got[num_rows:].contiguous().view(torch.uint8) == 0xA5).all()
    assert (seen.replies(1, 0).view(torch.uint8) == 0xA5).all()
    assert torch.equal(seen.copy()[: made.shape.areas["end"]], other)


def test_a_dispatch_says_what_it_brings_in_its_slot_and_at_the_doorbell(gpu: Gpu) -> None:
    made, _ = gpu.attached(make_shape(), num_ranks=1)
    seen, inputs = Mapped(made), make_rows(made.shape, 7, seed=1)
    wanted = {
        "epoch": EPOCH,
        "step": (7 << 32) + 3,
        "layer_id": 4,
        "micro_batch_id": 1,
        "num_rows": 7,
        "kind": Kind.DECODE,
        "num_micro_batches": 2,
    }

    for number in (1, 2):
        _send(made, 1, 4, inputs, step=(7 << 32) + 3)

        words = seen.words(1).tolist()
        assert layout.header_of(words) == (number, Dispatch(**wanted))
        assert words[layout.ROWS_HERE] == words[layout.ROWS_WANTED] == 7 * number
        assert (words[layout.NUM_REPLIED], words[layout.NUM_WANTED]) == (0, 7)
        assert seen.is_pending(1) and not seen.is_pending(0)
        assert seen.doorbells.rung() == [Dispatch(**wanted)]
        assert seen.doorbells.seq_of_next(1, is_served=True) == number


def test_a_dispatch_that_is_not_to_ring_does_not(gpu: Gpu) -> None:
    made, _ = gpu.attached(make_shape(), num_ranks=1)
    seen, inputs = Mapped(made), make_rows(made.shape, 7, seed=1)
    made.stage_step(step=1, kind=Kind.PREFILL, num_micro_batches=1, num_rows=EVERY_ROW)

    made.dispatch(0, 3, *inputs, rings=False)

    assert seen.is_pending(0) and not seen.line.any()


@pytest.mark.parametrize(("first_row", "num_left"), [(0, 26), (16, 10), (25, 1), (26, 0), (40, 0)])
def test_rows_beyond_those_of_the_step_never_leave(gpu: Gpu, first_row: int, num_left: int) -> None:
    made, _ = gpu.attached(make_shape(), num_ranks=1)
    seen, inputs = Mapped(made), make_rows(made.shape, 32, seed=2)
    seen.fill(0xA5)
    made.stage_step(step=1, kind=Kind.DECODE, num_micro_batches=2, num_rows=26)

    made.dispatch(1, 3, *inputs, first_row=first_row, rings=True)

    for got, wanted in zip(seen.request(1), inputs, strict=True):
        assert torch.equal(got[:num_left], wanted[:num_left])
        assert (got[num_left:].contiguous().view(torch.uint8) == 0xA5).all()
    assert [header.num_rows for header in seen.doorbells.rung()] == [num_left][: num_left > 0]
    assert seen.is_pending(1) == (num_left > 0)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_dispatch_that_is_not_attached_leaves_its_slot_as_it_was(
    gpu: Gpu, is_aborted: bool
) -> None:
    made = gpu.slab(make_shape())
    if is_aborted:
        made.attach(EPOCH, 1)
        made.abort()
    seen, inputs = Mapped(made), make_rows(made.shape, 7, seed=3)
    before = seen.copy()

    _send(made, 0, 3, inputs)
    made.combine(0, 7)

    assert not seen.line[: layout.ABORTED_AT].any()
    for slot in range(made.shape.num_slots):  # blocks count themselves all the same
        seen.words(slot)[[layout.ROWS_HERE, layout.ROWS_BEFORE]] -= 7 * (slot == 0)
    assert torch.equal(seen.copy(), before)
    seen.words(0)[[layout.ROWS_HERE, layout.ROWS_BEFORE]] += 7
    made.detach()
    made.attach(EPOCH, 1)
    _send(made, 0, 3, inputs)
    assert seen.is_pending(0) and len(seen.doorbells.rung()) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_fp8_are_those_that_torch_makes(gpu: Gpu, dtype: str) -> None:
    shape = make_shape(dtype, is_fp8=True, hidden_size=384)
    made, _ = gpu.attached(shape, num_ranks=1)
    seen, inputs = Mapped(made), make_rows(shape, 32, seed=4)
    inputs[0][3] *= 1e-3
    inputs[0][4] = 0
    seen.fill(0xA5)

    _send(made, 0, 3, inputs)

    values, scales = _quantised(inputs[0])
    got = seen.area(0, "hidden_states", 384, torch.uint8)
    assert torch.equal(got[:32], values.view(torch.uint8))
    assert torch.equal(seen.area(0, "scales", 3, torch.float32)[:32], scales)
    assert (got[32:] == 0xA5).all()


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    groups = rows.float().view(len(rows), -1, layout.FP8_GROUP)
    scales = groups.abs().amax(2).clamp(min=1e-10) / 448
    return (groups / scales[:, :, None]).to(torch.float8_e4m3fn).view(rows.shape), scales


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_unit_gathers_rows_and_counts_choices_as_the_rank_has_its_experts(
    gpu: Gpu, dtype: str
) -> None:
    rank = Rank(make_shape(dtype), weigh, rank=1, num_ranks=2)
    made, (index,) = gpu.attached(make_shape(dtype), [rank])
    inputs = make_rows(made.shape, 7, seed=5)
    _exchange_to_hear(rank, made, index, inputs)
    _soil(rank)
    rank.exchange.submit(3, [member(index, 0, 7)])

    rows = rank.exchange.pull(16)

    local = inputs[1] - NUM_EXPERTS // 2
    local[(local < 0) | (local >= NUM_EXPERTS // 2)] = -1
    assert torch.equal(rows.hidden_states[:7], inputs[0])
    assert torch.equal(rows.topk_ids[:7], local)
    assert torch.equal(rows.topk_weights[:7], inputs[2])
    assert (rows.topk_ids[7:] == -1).all() and (rows.topk_weights[7:] == 0).all()
    counts = rank.exchange.expert_counts
    assert torch.equal(counts[LAYER_IDS.index(3)], torch.bincount(local[local >= 0], minlength=8))
    assert counts.sum() == (local >= 0).sum()
    assert (rank.exchange.topk_ids[16:] == 77).all()


def _soil(rank: Rank) -> None:
    """So that a row which is left as it was, is seen."""
    for staged in (rank.exchange.hidden_states, rank.exchange.topk_ids, rank.exchange.topk_weights):
        staged.fill_(77)


@pytest.mark.parametrize("num_members", [1, 2, 31, 32, 33, 40, 65])
def test_a_unit_takes_the_rows_of_many_peers_in_order_and_answers_each(
    gpu: Gpu, num_members: int
) -> None:
    shape = make_shape(max_rows=8, num_slots=4, max_ranks=1)
    rank = Rank(shape, weigh, max_peers=65)
    slabs = [gpu.attached(shape, [rank])[0] for _ in range(-(-num_members // 4))]
    inputs, members, places = [], [], []
    for number in range(num_members):
        index, slot = divmod(number, 4)
        inputs.append(make_rows(shape, number % 3 + 1, seed=number))
        places.append((slabs[index], slot))
        members.append(member(index, slot, len(inputs[-1][0])))
        _send(slabs[index], slot, 7, inputs[-1])
        assert rank.table.rung(index)
    _soil(rank)

    rank.serve(7, members, bucket=160)
    assert not any(Mapped(made).is_pending(slot) for made, slot in places)
    totals = [made.combine(slot, len(i[0])) for (made, slot), i in zip(places, inputs, strict=True)]

    assert all(torch.equal(t, reference(i)) for t, i in zip(totals, inputs, strict=True))
    rows = torch.cat([each[0] for each in inputs])
    assert torch.equal(rank.exchange.hidden_states[: len(rows)], rows)
    assert (rank.exchange.topk_ids[len(rows) : 160] == -1).all()
    assert rank.exchange.num_done == 1 and rank.exchange.error is None


@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_a_unit_of_nobody_or_of_dead_peers_has_no_rows(gpu: Gpu, num_rows: int) -> None:
    rank = Rank(make_shape(), weigh)
    made, (index,) = gpu.attached(make_shape(), [rank])
    if num_rows:
        _exchange_to_hear(rank, made, index, make_rows(made.shape, num_rows, seed=6))
    rank.table.mark_dead(index)

    rank.serve(3, [member(index, 0, num_rows)] if num_rows else [], bucket=16)

    assert (rank.exchange.topk_ids[:16] == -1).all()
    assert rank.exchange.num_done == 1 and rank.exchange.error is None
    assert Mapped(made).is_pending(0) == (num_rows > 0)


def test_members_beside_a_dead_one_are_served(gpu: Gpu) -> None:
    rank = Rank(make_shape(), weigh)
    slabs, indices = zip(*[gpu.attached(make_shape(), [rank]) for _ in range(3)], strict=True)
    inputs = [make_rows(slabs[0].shape, 5 + number, seed=number) for number in range(3)]
    for made, (index,), each in zip(slabs, indices, inputs, strict=True):
        _exchange_to_hear(rank, made, index, each)
    rank.table.mark_dead(1)

    rank.serve(3, [member(i, 0, 5 + i) for i in range(3)], bucket=16)

    for number in (0, 2):
        total = slabs[number].combine(0, 5 + number)
        assert torch.equal(total, reference(inputs[number]))
    assert Mapped(slabs[1]).is_pending(0)
    assert torch.equal(rank.exchange.hidden_states[5:12], inputs[2][0])


def test_who_dies_before_the_answer_is_not_answered(gpu: Gpu) -> None:
    rank = Rank(make_shape(), weigh)
    made, (index,) = gpu.attached(make_shape(), [rank])
    _exchange_to_hear(rank, made, index, make_rows(made.shape, 8, seed=7))
    rank.exchange.submit(3, [member(index, 0, 8)])
    rows = rank.exchange.pull(16)
    rank.table.mark_dead(index)

    rank.exchange.push(rows.hidden_states, 16)

    assert Mapped(made).is_pending(0) and rank.exchange.num_done == 1


def test_a_wait_for_rows_ends_when_they_come_or_their_peer_is_marked_dead(gpu: Gpu) -> None:
    rank = Rank(make_shape(), weigh)
    living, (at_living,) = gpu.attached(make_shape(), [rank])
    dying, (at_dying,) = gpu.attached(make_shape(), [rank])
    inputs = make_rows(living.shape, 8, seed=7)
    members = [member(at_dying, 0, 8), member(at_living, 0, 8)]
    for made, index in ((living, at_living), (dying, at_dying)):
        _exchange_to_hear(rank, made, index, inputs)
    rank.serve(3, members, bucket=16)
    thread = _beside(lambda: rank.serve(4, members, bucket=16))

    _send(living, 0, 4, inputs)
    thread.join(0.05)
    is_waiting = thread.is_alive()
    rank.table.mark_dead(at_dying)
    thread.join(PATIENCE_S)

    assert is_waiting and rank.exchange.num_done == 2
    assert torch.equal(living.combine(0, 8), reference(inputs))


def _beside(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("layer_id", "num_rows", "said"),
    [
        (4, 8, "attention server 1 has rows for layer 3, expected those for layer 4"),
        (3, 9, "attention server 1 has 8 rows for layer 3, not those that it announced"),
    ],
)
def test_rows_that_are_not_those_of_the_unit_are_told_and_not_answered(
    gpu: Gpu, layer_id: int, num_rows: int, said: str
) -> None:
    rank = Rank(make_shape(), weigh)
    right, (at_right,) = gpu.attached(make_shape(), [rank])
    wrong, (at_wrong,) = gpu.attached(make_shape(), [rank])
    inputs = make_rows(right.shape, 8, seed=8)
    _send(right, 0, layer_id, inputs)
    _send(wrong, 0, 3, inputs)
    assert rank.table.rung(at_right) and rank.table.rung(at_wrong)

    rank.serve(layer_id, [member(at_wrong, 0, num_rows), member(at_right, 0, 8)], bucket=32)

    assert rank.exchange.error == said
    assert Mapped(wrong).is_pending(0) and not Mapped(right).is_pending(0)
    assert torch.equal(right.combine(0, 8), reference(inputs))
    rank.exchange.clear_error()
    assert rank.exchange.error is None and rank.exchange.num_done == 1


def test_pieces_of_an_exchange_are_answered_after_the_last(gpu: Gpu) -> None:
    rank = Rank(make_shape(), weigh)
    made, (index,) = gpu.attached(make_shape(), [rank])
    seen, inputs = Mapped(made), make_rows(made.shape, 40, seed=9)
    _exchange_to_hear(rank, made, index, inputs)

    for first_row, num_rows in ((0, 16), (16, 16), (32, 8)):
        assert seen.is_pending(0) and seen.words(0)[layout.NUM_REPLIED] == first_row
        _soil(rank)
        rank.exchange.submit(
            3,
            [member(index, 0, 40)],
            first_row=first_row,
            num_rows=num_rows,
            is_last_piece=first_row == 32,
        )
        rank.run(16)
        staged = rank.exchange.hidden_states[:num_rows]
        assert torch.equal(staged, inputs[0][first_row : first_row + num_rows])
        assert (rank.exchange.topk_ids[num_rows:16] == -1).all()

    assert not seen.is_pending(0) and rank.exchange.num_done == 3
    assert torch.equal(made.combine(0, 40), reference(inputs))


def test_rows_for_which_a_bucket_has_no_room_are_left_out(gpu: Gpu) -> None:
    rank = Rank(make_shape(), weigh)
    slabs = [gpu.attached(make_shape(), [rank])[0] for _ in range(3)]
    inputs = [make_rows(slabs[0].shape, 10, seed=number) for number in range(3)]
    for index, each in enumerate(inputs):
        _exchange_to_hear(rank, slabs[index], index, each)
        Mapped(slabs[index]).fill(0)
        Mapped(slabs[index]).request(0)[0][:10] = each[0]
    _soil(rank)

    rank.serve(3, [member(index, 0, 10) for index in range(3)], bucket=16)

    staged = rank.exchange.hidden_states
    assert torch.equal(staged[:16], torch.cat([inputs[0][0], inputs[1][0][:6]]))
    assert (staged[16:] == 77).all()
    assert not Mapped(slabs[1]).replies(0, 0)[6:].any()
    assert not Mapped(slabs[2]).replies(0, 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_fp8_are_pulled_as_the_model_has_them(gpu: Gpu, dtype: str) -> None:
    shape = make_shape(dtype, is_fp8=True, hidden_size=384)
    rank = Rank(shape, weigh)
    made, (index,) = gpu.attached(shape, [rank])
    inputs = make_rows(shape, 20, seed=10)
    inputs[0][3] *= 1e-3
    _exchange_to_hear(rank, made, index, inputs)
    rank.exchange.submit(3, [member(index, 0, 20)])

    rows = rank.exchange.pull(32)

    values, scales = _quantised(inputs[0])
    wanted = values.float().view(20, 3, -1) * scales[:, :, None]
    assert torch.equal(rows.hidden_states[:20], wanted.view(20, -1).to(getattr(torch, dtype)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_only_the_last_rank_completes_an_exchange(gpu: Gpu, order: Sequence[int]) -> None:
    shape = make_shape(max_ranks=3)
    ranks = [Rank(shape, weigh, rank=rank, num_ranks=4) for rank in range(3)]
    made, indices = gpu.attached(shape, ranks)
    seen, inputs = Mapped(made), make_rows(shape, 9, seed=11)
    _send(made, 0, 3, inputs)
    pending, numbers = [], []

    for rank in order:
        assert ranks[rank].table.rung(indices[rank])
        ranks[rank].serve(3, [member(indices[rank], 0, 9)], bucket=16)
        pending.append(seen.is_pending(0))
        numbers.append(made.num_replied(0))

    assert pending == [True, True, False] and numbers == [1, 2, 3]
    for rank in range(3):
        wanted = reference(inputs, rank=rank, num_ranks=4)
        assert torch.equal(seen.replies(0, rank)[:9], wanted)


@pytest.mark.parametrize("epoch", [EPOCH + 1, EPOCH + (1 << 32)])
def test_a_rank_of_an_epoch_that_is_over_does_not_answer(gpu: Gpu, epoch: int) -> None:
    lost, new = Rank(make_shape(), weigh), Rank(make_shape(), weigh)
    made, (at_lost,) = gpu.attached(make_shape(), [lost])
    seen, inputs = Mapped(made), make_rows(made.shape, 8, seed=12)
    _exchange_to_hear(lost, made, at_lost, inputs)
    index = new.open(made, epoch)
    made.attach(epoch, 1)

    lost.serve(3, [member(at_lost, 0, 8)], bucket=8)

    assert seen.is_pending(0) and lost.exchange.num_done == 1
    assert [header.epoch for header in new.table.rung(index)] == [epoch]
    new.serve(3, [member(index, 0, 8)], bucket=8)
    assert torch.equal(made.combine(0, 8), reference(inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_partial_sums_are_added_in_rank_order_and_float32(
    gpu: Gpu, dtype: str, num_ranks: int
) -> None:
    shape = make_shape(dtype, max_ranks=4)
    made, _ = gpu.attached(shape, num_ranks=num_ranks)
    seen = Mapped(made)
    for rank in range(4):
        seen.replies(1, rank).copy_(make_rows(shape, shape.max_rows, seed=rank)[0])
        seen.replies(1, rank)[0, :8] = torch.tensor([3e4, -3e4, 1e-7, 3e-8, 6e4, 1, -0.0, 2049])
    parts = [seen.replies(1, rank).clone() for rank in range(4)]

    total = made.combine(1, 37)

    wanted = parts[0].float().clone()
    for part in parts[1:num_ranks]:
        wanted += part.float()
    assert torch.equal(total, wanted[:37].to(total.dtype))
    assert torch.equal(seen.replies(1, 0)[37:], parts[0][37:])
    assert all(torch.equal(seen.replies(1, rank), parts[rank]) for rank in range(1, 4))


def test_nothing_is_added_while_nobody_is_attached(gpu: Gpu) -> None:
    made, _ = gpu.attached(make_shape(), num_ranks=2)
    seen = Mapped(made)
    seen.fill(0x3F)
    made.abort()

    total = made.combine(0, 8)

    assert (total.contiguous().view(torch.uint8) == 0x3F).all()


def test_who_attaches_is_asked_for_what_is_pending_and_only_that(gpu: Gpu) -> None:
    ranks = [Rank(make_shape(), weigh, rank=rank, num_ranks=2) for rank in range(2)]
    made, indices = gpu.attached(make_shape(), ranks)
    seen, inputs = Mapped(made), make_rows(made.shape, 8, seed=13)
    _send(made, 1, 3, inputs, step=9)
    assert ranks[0].table.rung(indices[0])
    ranks[0].serve(3, [member(indices[0], 1, 8)], bucket=8)
    assert made.num_replied(1) == 1
    (before,) = seen.doorbells.rung()

    made.attach(EPOCH + 1, 2)

    (after,) = seen.doorbells.rung()
    assert (before.epoch, after.epoch) == (EPOCH, EPOCH + 1)
    assert (after.step, after.micro_batch_id, after.num_rows) == (9, 1, 8)
    assert seen.doorbells.seq_of_next(1, is_served=False) == seen.words(1)[0] == 1
    assert made.num_replied(1) == 0 and seen.is_pending(1) and not seen.is_pending(0)


def test_what_leaves_in_the_new_epoch_is_not_asked_for_again(gpu: Gpu) -> None:
    made, _ = gpu.attached(make_shape(), num_ranks=1)
    seen = Mapped(made)
    _send(made, 0, 3, make_rows(made.shape, 8, seed=14))
    assert len(seen.doorbells.rung()) == 1

    made.attach(EPOCH, 1)

    assert not seen.doorbells.rung()


def test_an_abort_ends_the_wait(gpu: Gpu) -> None:
    made, _ = gpu.attached(make_shape(), num_ranks=1)
    seen = Mapped(made)
    _send(made, 0, 3, make_rows(made.shape, 8, seed=15))
    thread = _beside(lambda: made.combine(0, 8))
    thread.join(0.05)
    is_waiting = thread.is_alive()

    made.abort()

    thread.join(PATIENCE_S)
    assert is_waiting and not thread.is_alive()
    assert not seen.is_pending(0)
    made.detach()
    made.attach(EPOCH + 1, 1)
    assert len(seen.doorbells.rung()) == 1  # of before the abort


def test_an_abort_ends_the_wait_while_nothing_can_be_launched(gpu: Gpu) -> None:
    made, _ = gpu.attached(make_shape(), num_ranks=1)
    inputs = make_rows(made.shape, 8, seed=15)
    _send(made, 0, 3, inputs)
    thread = _beside(lambda: made.combine(0, 8))
    launch, launched_after = made._set_link, []

    def launch_after_the_wait(link: LinkWord) -> None:
        thread.join(5.0)
        launched_after.append(not thread.is_alive())
        launch(link)

    made._set_link = launch_after_the_wait  # type: ignore[method-assign,assignment]
    made.abort()

    made._set_link = launch  # type: ignore[method-assign]
    thread.join(PATIENCE_S)
    assert launched_after == [True]
    made.detach()
    made.attach(EPOCH + 1, 1)
    _send(made, 0, 3, inputs)
    thread = _beside(lambda: made.combine(0, 8))
    thread.join(1.0)
    is_waiting = thread.is_alive()  # as any wait does
    made.abort()
    thread.join(PATIENCE_S)
    assert is_waiting


def test_rows_are_waited_for_though_their_header_is_there(gpu: Gpu) -> None:
    rank = Rank(make_shape(), weigh)
    made, (index,) = gpu.attached(make_shape(), [rank])
    inputs = make_rows(made.shape, 8, seed=18)
    _exchange_to_hear(rank, made, index, inputs)
    rows_here = Mapped(made).words(0)[layout.ROWS_HERE :][:1]
    rows_here -= 1  # a block has not stored its row yet
    thread = _beside(lambda: rank.serve(3, [member(index, 0, 8)], bucket=8))
    thread.join(0.3)
    is_waiting = thread.is_alive()

    rows_here += 1

    thread.join(PATIENCE_S)
    assert is_waiting
    assert torch.equal(made.combine(0, 8), reference(inputs))


def test_a_micro_batch_without_rows_waits_for_nobody_though_the_last_one_was_given_up(
    gpu: Gpu,
) -> None:
    made, _ = gpu.attached(make_shape(), num_ranks=2)
    inputs = make_rows(made.shape, 8, seed=19)
    _send(made, 0, 3, inputs)
    made.abort()
    made.detach()
    made.attach(EPOCH + 1, 1)
    made.stage_step(step=2, kind=Kind.DECODE, num_micro_batches=1, num_rows=8)

    made.dispatch(0, 3, *inputs, first_row=8, rings=True)

    made.combine(0, 8)  # comes back
    assert not Mapped(made).is_pending(0)


def test_a_wait_ends_with_the_reply(gpu: Gpu) -> None:
    rank = Rank(make_shape(), weigh)
    made, (index,) = gpu.attached(make_shape(), [rank])
    inputs, totals = make_rows(made.shape, 8, seed=16), []
    _exchange_to_hear(rank, made, index, inputs)
    thread = _beside(lambda: totals.append(made.combine(0, 8)))
    thread.join(0.05)
    is_waiting = thread.is_alive()

    rank.serve(3, [member(index, 0, 8)], bucket=8)

    thread.join(PATIENCE_S)
    assert is_waiting and torch.equal(totals[0], reference(inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_go_through_all_layers(gpu: Gpu, dtype: str, num_ranks: int) -> None:
    shape = make_shape(dtype)
    ranks = [Rank(shape, weigh, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    made, indices = gpu.attached(shape, ranks)
    inputs = make_rows(shape, 12, seed=17)
    got = wanted = inputs[0]

    for step in range(2):
        for layer_id in LAYER_IDS:
            _send(made, step, layer_id, (got, *inputs[1:]), step=step)
            for rank, index in zip(ranks, indices, strict=True):
                assert [each.layer_id for each in rank.table.rung(index)] == [layer_id]
                rank.serve(layer_id, [member(index, step, 12)], bucket=16)
            got = made.combine(step, 12) * 0.125
            parts = [
                reference((wanted, *inputs[1:]), rank=rank, num_ranks=num_ranks).float()
                for rank in range(num_ranks)
            ]
            wanted = sum(parts[1:], parts[0]).to(got.dtype) * 0.125

    assert torch.equal(got, wanted) and got.any()
    assert all(rank.exchange.num_done == 6 and not rank.exchange.error for rank in ranks)


FAULTS: dict[str, tuple[str, str, Callable[[Gpu], None]]] = {
    "a row counts as two": (
        "add_acq_rel(member->words + NUM_REPLIED, 1) + 1",
        "add_acq_rel(member->words + NUM_REPLIED, 2) + 2",
        test_pieces_of_an_exchange_are_answered_after_the_last,
    ),
    "a piece that begins at the first row": (
        "source = row - member->first + plan->first_row",
        "source = row - member->first",
        test_pieces_of_an_exchange_are_answered_after_the_last,
    ),
    "rows of the first member are forgotten": (
        "if (lane >= distance) stop += before",
        "if (lane > distance) stop += before",
        functools.partial(
            test_a_unit_takes_the_rows_of_many_peers_in_order_and_answers_each, num_members=2
        ),
    ),
    "members after the first 32 begin anew": (
        "    stop += total;\n",
        "",
        functools.partial(
            test_a_unit_takes_the_rows_of_many_peers_in_order_and_answers_each, num_members=33
        ),
    ),
    "ids as the model has them": (
        "local = ids[i] - first_expert",
        "local = ids[i]",
        functools.partial(
            test_a_unit_gathers_rows_and_counts_choices_as_the_rank_has_its_experts,
            dtype="bfloat16",
        ),
    ),
    "padding leaves": (
        "if (is_attached && row < num_rows)",
        "if (is_attached)",
        functools.partial(
            test_rows_beyond_those_of_the_step_never_leave, first_row=16, num_left=10
        ),
    ),
    "the first rank completes an exchange": (
        "num_rows * control[NUM_RANKS]",
        "num_rows",
        functools.partial(test_only_the_last_rank_completes_an_exchange, order=(0, 1, 2)),
    ),
    "the host's word is not looked at": (
        "if (is_aborted && spins",
        "if (false && spins",
        test_an_abort_ends_the_wait_while_nothing_can_be_launched,
    ),
    "rows are taken before they are there": (
        "wait_for(words + ROWS_HERE, load_relaxed(words + ROWS_WANTED), &peer->is_alive) &&",
        "",
        test_rows_are_waited_for_though_their_header_is_there,
    ),
    "half of the epoch is compared": (
        "epoch_high == member->epoch_high &&",
        "",
        functools.partial(
            test_a_rank_of_an_epoch_that_is_over_does_not_answer, epoch=EPOCH + (1 << 32)
        ),
    ),
    "whoever brought other rows is answered": (
        "got_rows == member.z",
        "got_rows",
        functools.partial(
            test_rows_that_are_not_those_of_the_unit_are_told_and_not_answered,
            layer_id=3,
            num_rows=9,
            said="attention server 1 has 8 rows for layer 3, not those that it announced",
        ),
    ),
    "who has died meanwhile is answered": (
        "is_alive == 1 && epoch_low",
        "epoch_low",
        test_who_dies_before_the_answer_is_not_answered,
    ),
    "a dispatch that is not attached counts one block too few": (
        "if (is_attached && row < num_rows) {",
        "if (!is_attached && row == 0) return;\n  if (is_attached && row < num_rows) {",
        functools.partial(
            test_a_dispatch_that_is_not_attached_leaves_its_slot_as_it_was, is_aborted=False
        ),
    ),
    "replies of before count for the new epoch": (
        "  store_pair(words + NUM_REPLIED, 0, words[HEADER + 6] * num_ranks);\n",
        "",
        test_who_attaches_is_asked_for_what_is_pending_and_only_that,
    ),
    "ranks are added in the model's dtype": (
        "sum[j] += next[j];",
        "sum[j] += next[j];\n      unpack(pack(sum), sum);",
        functools.partial(
            test_partial_sums_are_added_in_rank_order_and_float32, dtype="bfloat16", num_ranks=3
        ),
    ),
    "values of a pair change places": (
        "to_e4m3x2(f[2 * i + 1] / scale, f[2 * i] / scale)",
        "to_e4m3x2(f[2 * i] / scale, f[2 * i + 1] / scale)",
        functools.partial(test_rows_in_fp8_are_those_that_torch_makes, dtype="bfloat16"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(gpu: Gpu, name: str) -> None:
    right, wrong, test = FAULTS[name]
    assert gpu.source.count(right) == 1, f"exchange.cu no longer says {right!r}"
    gpu.source = gpu.source.replace(right, wrong)

    with pytest.raises(AssertionError):
        test(gpu)
