from __future__ import annotations

from typing import Any

import pytest
import torch
from peers import make_header, make_spec
from torch import Tensor

from sglang_afd.errors import CapacityError, ExchangeFailed, PeerLost, ProtocolError
from sglang_afd.protocol import codec
from sglang_afd.protocol.messages import (
    Attached,
    Challenge,
    Combine,
    Failed,
    Refusal,
    RefusalCode,
    ToAttn,
)
from sglang_afd.transport.base import Rows
from sglang_afd.transport.frames import to_frame
from sglang_afd.transport.slots import Slots

PLACE = {"epoch": 7, "step": 3, "layer_id": 1, "micro_batch_id": 0}


def make_rows(num_rows: int = 2, dtype: torch.dtype = torch.float32) -> Rows:
    return Rows(
        hidden_states=torch.ones(num_rows, 4, dtype=dtype),
        topk_ids=torch.zeros(num_rows, 2, dtype=torch.int32),
        topk_weights=torch.ones(num_rows, 2),
    )


def reply(partial: Tensor, **changes: Any) -> list[bytes | memoryview]:
    header = {**PLACE, "num_rows": partial.shape[0], **changes}
    return [codec.encode(Combine(**header)), to_frame(partial)]


def occupied(num_ranks: int = 2, *, dtype: str = "float32") -> Slots:
    slots = Slots(make_spec(dtype=dtype), num_ranks)
    slots.put(make_header(), make_rows(dtype=getattr(torch, dtype)))
    return slots


def test_a_slot_is_whole_when_every_rank_has_replied() -> None:
    slots = occupied(3)

    assert (slots.missing(0), slots.is_whole(0)) == ([0, 1, 2], False)
    slots.receive(2, reply(torch.zeros(2, 4)))
    slots.receive(0, reply(torch.zeros(2, 4)))
    assert (slots.missing(0), slots.is_whole(0)) == ([1], False)
    slots.receive(1, reply(torch.zeros(2, 4)))
    assert (slots.missing(0), slots.is_whole(0)) == ([], True)


def test_one_ranks_reply_is_the_result_bit_by_bit() -> None:
    slots, partial = occupied(1, dtype="bfloat16"), torch.randn(2, 4).bfloat16()

    slots.receive(0, reply(partial))

    assert torch.equal(slots.take(0), partial)


ORDERED = (1e8, -1e8, 1.0)  # 1 in float32, but 0 in any other order


@pytest.mark.parametrize("arrival", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_partial_sums_are_added_in_rank_order_whatever_the_order_of_arrival(
    arrival: tuple[int, ...],
) -> None:
    slots = occupied(3)

    for rank in arrival:
        slots.receive(rank, reply(torch.full((2, 4), ORDERED[rank])))

    assert slots.take(0).unique().tolist() == [1.0]


def test_partial_sums_in_bfloat16_are_added_in_float32() -> None:
    slots = occupied(3, dtype="bfloat16")
    # In bfloat16 256 + 1 is 256: a sum rounded at each step would lose both ones.
    for rank, value in enumerate((256.0, 1.0, 1.0)):
        slots.receive(rank, reply(torch.full((2, 4), value, dtype=torch.bfloat16)))

    total = slots.take(0)

    assert total.dtype == torch.bfloat16
    assert total.unique().tolist() == [258.0]


def test_a_result_does_not_change_what_a_rank_sent() -> None:
    slots, first = occupied(2), torch.ones(2, 4)
    slots.receive(0, reply(first))
    slots.receive(1, reply(torch.ones(2, 4)))

    slots.take(0)

    assert torch.equal(first, torch.ones(2, 4))


def test_a_taken_slot_is_free_again() -> None:
    slots = occupied(1)
    slots.receive(0, reply(torch.zeros(2, 4)))
    slots.take(0)

    assert slots.put(make_header(step=4), make_rows())


def test_slots_are_independent() -> None:
    slots = occupied(1)
    slots.put(make_header(micro_batch_id=1), make_rows())

    slots.receive(0, reply(torch.full((2, 4), 5.0), micro_batch_id=1))

    assert not slots.is_whole(0)
    assert slots.take(1).unique().tolist() == [5.0]


def test_an_occupied_slot_takes_no_second_exchange() -> None:
    with pytest.raises(AssertionError, match="slot 0 already has an exchange in flight"):
        occupied().put(make_header(), make_rows())


def test_rows_of_another_dtype_are_our_own_bug() -> None:
    with pytest.raises(AssertionError, match=r"bfloat16, the handshake agreed on torch\.float32"):
        Slots(make_spec(), 1).put(make_header(), make_rows(dtype=torch.bfloat16))


@pytest.mark.parametrize("num_rows", [0, 6])
def test_more_rows_than_agreed_do_not_fit(num_rows: int) -> None:
    slots = Slots(make_spec(max_rows=5), 1)

    with pytest.raises(CapacityError, match=rf"{num_rows} rows in one exchange; 1 to 5 fit"):
        slots.put(make_header(num_rows=num_rows), make_rows(num_rows))


def test_exactly_the_agreed_rows_fit() -> None:
    assert Slots(make_spec(max_rows=5), 1).put(make_header(num_rows=5), make_rows(5))


@pytest.mark.parametrize("field", ["epoch", "step", "layer_id", "micro_batch_id", "num_rows"])
def test_a_reply_to_something_else_is_refused_with_both_places(field: str) -> None:
    slots = occupied()
    sent = {**PLACE, "num_rows": 2}
    got = sent | {field: sent[field] + 1}

    with pytest.raises(ProtocolError) as caught:
        slots.receive(1, reply(torch.zeros(2, 4), **got))

    assert f"MLP rank 1 replied to epoch, step, layer, micro-batch, rows {(*got.values(),)}" in str(
        caught.value
    )
    assert slots.missing(0) == [0, 1]


def test_a_second_reply_of_a_rank_is_refused() -> None:
    slots = occupied()
    slots.receive(0, reply(torch.zeros(2, 4)))

    with pytest.raises(ProtocolError, match="MLP rank 0 sent a second or broken reply"):
        slots.receive(0, reply(torch.ones(2, 4)))


@pytest.mark.parametrize("num_frames", [1, 3])
def test_a_reply_with_a_wrong_number_of_frames_is_refused(num_frames: int) -> None:
    frames = (reply(torch.zeros(2, 4)) + [b"more"])[:num_frames]

    with pytest.raises(ProtocolError, match="second or broken reply"):
        occupied().receive(0, frames)


def test_a_reply_of_another_shape_is_refused_with_both_sizes() -> None:
    with pytest.raises(ProtocolError, match="partial sum came as 24 bytes; 2 rows of 4 .* are 32"):
        occupied().receive(0, reply(torch.zeros(2, 3)))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Failed(**PLACE, code=RefusalCode.EXPERT, message="no"), "declined an exchange: no"),
        (Refusal(code=RefusalCode.CAPACITY, message="no"), "refused an exchange: no"),
        (Refusal(code=RefusalCode.PROTOCOL, message="no"), "refused an exchange: no"),
    ],
)
def test_what_would_fail_again_is_told_apart_from_a_lost_rank(answer: ToAttn, told: str) -> None:
    with pytest.raises(ExchangeFailed, match=f"MLP rank 1 {told}"):
        occupied().receive(1, [codec.encode(answer)])


@pytest.mark.parametrize("code", [RefusalCode.EPOCH, RefusalCode.NOT_ATTACHED])
def test_a_rank_that_knows_us_no_longer_is_lost_and_nothing_failed(code: RefusalCode) -> None:
    with pytest.raises(PeerLost, match="MLP rank 1 knows us no longer: no") as caught:
        occupied().receive(1, [codec.encode(Refusal(code=code, message="no"))])

    assert not isinstance(caught.value, ExchangeFailed)


@pytest.mark.parametrize(
    "answer",
    [
        Challenge(nonce=b"", proof=b""),
        Attached(epoch=7, rank=0, ep_size=1, first_expert=0, stop_expert=6, boot_id="", door=""),
    ],
)
def test_a_second_handshake_message_is_refused(answer: ToAttn) -> None:
    with pytest.raises(ProtocolError, match=f"sent a second {type(answer).__name__}"):
        occupied().receive(0, [codec.encode(answer)])


def test_garbage_is_refused() -> None:
    with pytest.raises(ProtocolError, match="mark"):
        occupied().receive(0, [b"garbage"])
