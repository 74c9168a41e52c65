from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peers import SPEC, hello, make_gate, make_header, make_spec
from torch import Tensor

from sglang_afd.protocol import codec
from sglang_afd.protocol.handshake import Greeter
from sglang_afd.protocol.messages import (
    Combine,
    Detach,
    Dispatch,
    Failed,
    ModelSpec,
    Refusal,
    RefusalCode,
    ToAttn,
    ToMlp,
)
from sglang_afd.transport.base import Arrived, Exchange, PeerAttached, PeerGone, Rows
from sglang_afd.transport.frames import from_frame, pack_rows
from sglang_afd.transport.sessions import Sessions

PEER = b"peer"
EPOCH = 7


def ask(sessions: Sessions, message: ToMlp, peer: bytes = PEER) -> ToAttn:
    _, [(_, answer)] = sessions.receive(peer, [codec.encode(message)])
    return codec.decode_to_attn(answer[0])


def attach(sessions: Sessions, peer: bytes = PEER, spec: ModelSpec = SPEC) -> Any:
    greeter = Greeter(peer.decode(), spec, b"")
    message = greeter.answer(ask(sessions, greeter.hello(), peer), epoch=EPOCH)
    return sessions.receive(peer, [codec.encode(message)])


@pytest.fixture
def sessions() -> Sessions:
    """One attached peer."""
    sessions = Sessions(make_gate())
    attach(sessions)
    return sessions


def frames_of(
    header: Dispatch | None = None,
    *,
    hidden_states: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
) -> list[bytes | memoryview]:
    header = header or make_header()
    num_rows = max(1, min(header.num_rows, 8))
    tensors = (
        torch.arange(num_rows * 4.0).view(num_rows, 4) if hidden_states is None else hidden_states,
        torch.zeros(num_rows, 2, dtype=torch.int32) if topk_ids is None else topk_ids,
        torch.ones(num_rows, 2) if topk_weights is None else topk_weights,
    )
    hidden_states, topk_ids, topk_weights = tensors
    rows = Rows(hidden_states=hidden_states, topk_ids=topk_ids, topk_weights=topk_weights)
    return [codec.encode(header), pack_rows(rows)]


def arrive(sessions: Sessions, frames: list[bytes | memoryview]) -> Exchange:
    [event], messages = sessions.receive(PEER, frames)
    assert messages == []
    assert isinstance(event, Arrived)
    return event.exchange


def refusal_of(sessions: Sessions, frames: list[bytes | memoryview], peer: bytes = PEER) -> Refusal:
    before = sessions.num_refused
    events, [(_, answer)] = sessions.receive(peer, frames)
    assert events == []
    refusal = codec.decode_to_attn(answer[0])
    assert isinstance(refusal, Refusal)
    assert sessions.num_refused == before + 1
    return refusal


def test_an_attach_is_told_and_answered() -> None:
    sessions = Sessions(make_gate())

    events, [(_, answer)] = attach(sessions)

    assert events == [PeerAttached(peer=PEER, server_id="peer", epoch=EPOCH)]
    assert codec.decode_to_attn(answer[0]).epoch == EPOCH
    assert sessions.num_peers == 1


def test_a_refused_attach_leaves_nothing_behind() -> None:
    sessions = Sessions(make_gate())

    events, [(_, answer)] = attach(sessions, spec=make_spec(top_k=1))

    assert events == []
    assert codec.decode_to_attn(answer[0]).code == RefusalCode.MODEL
    assert (sessions.num_peers, sessions.num_refused) == (0, 1)


def test_peers_beyond_the_limit_are_refused_until_one_leaves() -> None:
    sessions = Sessions(make_gate(max_peers=1))
    attach(sessions, b"first")

    full, _ = attach(sessions, b"second")
    sessions.gone(b"first", "died")
    free, _ = attach(sessions, b"second")

    assert full == []
    assert [type(event) for event in free] == [PeerAttached]


def test_an_attached_peer_cannot_attach_again(sessions: Sessions) -> None:
    refusal = refusal_of(sessions, [codec.encode(hello())])

    assert refusal.code == RefusalCode.PROTOCOL
    assert "already attached" in refusal.message
    assert sessions.num_peers == 1


def test_a_dispatch_arrives_as_it_was_sent(sessions: Sessions) -> None:
    hidden_states, topk_weights = torch.randn(2, 4), torch.rand(2, 2)
    topk_ids = torch.tensor([[0, 5], [-1, 3]], dtype=torch.int32)

    exchange = arrive(
        sessions,
        frames_of(hidden_states=hidden_states, topk_ids=topk_ids, topk_weights=topk_weights),
    )

    assert (exchange.peer, exchange.header) == (PEER, make_header())
    assert torch.equal(exchange.rows.hidden_states, hidden_states)
    assert torch.equal(exchange.rows.topk_ids, topk_ids)
    assert torch.equal(exchange.rows.topk_weights, topk_weights)


def test_rows_before_the_handshake_are_refused(sessions: Sessions) -> None:
    refusal = refusal_of(sessions, frames_of(), peer=b"stranger")

    assert refusal == Refusal(
        code=RefusalCode.NOT_ATTACHED, message="this came before the handshake; attach first"
    )


@pytest.mark.parametrize("epoch", [0, 6, 8])
def test_rows_of_another_epoch_are_refused_with_both(sessions: Sessions, epoch: int) -> None:
    refusal = refusal_of(sessions, frames_of(make_header(epoch=epoch)))

    assert refusal.code == RefusalCode.EPOCH
    assert f"carries epoch {epoch}, this session is at 7; attach again" in refusal.message


@pytest.mark.parametrize("layer_id", [-1, 2, 4])
def test_a_layer_without_experts_is_refused_with_those_that_have(
    sessions: Sessions, layer_id: int
) -> None:
    refusal = refusal_of(sessions, frames_of(make_header(layer_id=layer_id)))

    assert refusal.code == RefusalCode.PROTOCOL
    assert f"layer {layer_id} has no experts here; MoE layers are 0 to 3" in refusal.message


@pytest.mark.parametrize("num_rows", [-1, 0, 6, 2**63])
def test_a_number_of_rows_beyond_the_agreed_is_refused(sessions: Sessions, num_rows: int) -> None:
    refusal = refusal_of(sessions, frames_of(make_header(num_rows=num_rows)))

    assert refusal.code == RefusalCode.CAPACITY
    assert f"{num_rows} rows in one exchange; 1 to 5 were agreed" in refusal.message


@pytest.mark.parametrize("num_frames", [1, 3])
def test_a_wrong_number_of_frames_is_refused(sessions: Sessions, num_frames: int) -> None:
    refusal = refusal_of(sessions, [*frames_of(), b"more"][:num_frames])

    assert refusal.code == RefusalCode.PROTOCOL
    assert f"a dispatch has 2 frames, got {num_frames}" in refusal.message


@pytest.mark.parametrize(
    ("tensors", "num_bytes"),
    [
        ({"hidden_states": torch.ones(1, 4)}, 48),
        ({"hidden_states": torch.ones(2, 4).bfloat16()}, 48),
        ({"topk_ids": torch.zeros(2, 2, dtype=torch.int64)}, 80),
        ({"topk_ids": torch.zeros(2, 3, dtype=torch.int32)}, 72),
        ({"topk_weights": torch.ones(2, 2).half()}, 56),
        ({"topk_weights": torch.ones(0, 2)}, 48),
    ],
)
def test_rows_of_another_size_are_refused_with_both_sizes(
    sessions: Sessions, tensors: dict[str, Tensor], num_bytes: int
) -> None:
    refusal = refusal_of(sessions, frames_of(**tensors))

    assert refusal.code == RefusalCode.PROTOCOL
    assert refusal.message == (
        f"rows came as {num_bytes} bytes; 2 rows of 4 torch.float32 and 2 choices are 64"
    )


@pytest.mark.parametrize("ids", [[0, 6], [-2, 0], [0, 2**31 - 1], [-(2**31), 5]])
def test_an_expert_that_does_not_exist_is_refused_with_the_range(
    sessions: Sessions, ids: list[int]
) -> None:
    topk_ids = torch.tensor([[0, 0], ids], dtype=torch.int32)

    refusal = refusal_of(sessions, frames_of(topk_ids=topk_ids))

    assert refusal.code == RefusalCode.PROTOCOL
    assert "the model has experts 0 to 5, and -1 for none" in refusal.message


@pytest.mark.parametrize("micro_batch_id", [-1, 4, 2**40])
def test_a_slot_beyond_the_last_is_refused(sessions: Sessions, micro_batch_id: int) -> None:
    refusal = refusal_of(sessions, frames_of(make_header(micro_batch_id=micro_batch_id)))

    assert f"micro-batch {micro_batch_id} of 4 is out of range" in refusal.message


def test_an_occupied_slot_takes_no_second_exchange(sessions: Sessions) -> None:
    arrive(sessions, frames_of())

    refusal = refusal_of(sessions, frames_of())

    assert refusal.code == RefusalCode.PROTOCOL
    assert "slot 0 already has an exchange in flight" in refusal.message


def test_the_slots_of_a_peer_are_independent(sessions: Sessions) -> None:
    arrive(sessions, frames_of())

    assert arrive(sessions, frames_of(make_header(micro_batch_id=1)))


def test_a_slot_is_free_again_once_it_is_answered(sessions: Sessions) -> None:
    answered = arrive(sessions, frames_of())
    sessions.combine_frames(answered, torch.zeros(2, 4))
    failed = arrive(sessions, frames_of(make_header(step=4)))
    sessions.failed_frames(failed, RefusalCode.EXPERT, "no")

    assert arrive(sessions, frames_of(make_header(step=5)))


def test_a_peer_that_comes_back_finds_its_slots_free(sessions: Sessions) -> None:
    arrive(sessions, frames_of())
    sessions.gone(PEER, "died")
    attach(sessions)

    assert arrive(sessions, frames_of())


@pytest.mark.parametrize("frame", [b"", b"garbage", b"AFD\x03\x80", b"AFD\x01\x80"])
def test_garbage_is_refused_and_the_session_stays(sessions: Sessions, frame: bytes) -> None:
    refusal = refusal_of(sessions, [frame])

    assert refusal.code == RefusalCode.PROTOCOL
    assert arrive(sessions, frames_of())


@given(st.lists(st.binary(max_size=64) | st.just(codec.encode(make_header())), min_size=1))
def test_no_frames_of_a_peer_raise(frames: list[bytes]) -> None:
    sessions = Sessions(make_gate())
    attach(sessions)

    events, messages = sessions.receive(PEER, frames)

    assert (events == []) == (len(messages) == 1)


def test_a_partial_sum_travels_under_the_exchanges_place(sessions: Sessions) -> None:
    partial = torch.randn(2, 4)

    header, rows = sessions.combine_frames(arrive(sessions, frames_of()), partial)

    assert codec.decode_to_attn(header) == Combine(
        epoch=7, step=3, layer_id=1, micro_batch_id=0, num_rows=2
    )
    assert torch.equal(from_frame(rows, (2, 4), torch.float32, "sum"), partial)


@pytest.mark.parametrize("partial", [torch.zeros(1, 4), torch.zeros(2, 4).bfloat16()])
def test_a_partial_sum_out_of_shape_is_our_own_bug(sessions: Sessions, partial: Tensor) -> None:
    exchange = arrive(sessions, frames_of())

    with pytest.raises(AssertionError, match=r"partial sum is .*, expected \(2, 4\)"):
        sessions.combine_frames(exchange, partial)


def test_a_failure_travels_under_the_exchanges_place(sessions: Sessions) -> None:
    exchange = arrive(sessions, frames_of())

    [frame] = sessions.failed_frames(exchange, RefusalCode.EXPERT, "no memory")

    assert codec.decode_to_attn(frame) == Failed(
        epoch=7,
        step=3,
        layer_id=1,
        micro_batch_id=0,
        code=RefusalCode.EXPERT,
        message="no memory",
    )


def test_a_detach_is_told_once_and_ends_the_session(sessions: Sessions) -> None:
    events, messages = sessions.receive(PEER, [codec.encode(Detach(epoch=EPOCH))])

    assert events == [PeerGone(peer=PEER, server_id="peer", reason="detached")]
    assert messages == []
    assert sessions.gone(PEER, "its connection ended") == []
    assert refusal_of(sessions, frames_of()).code == RefusalCode.NOT_ATTACHED


def test_a_stranger_that_leaves_is_not_told() -> None:
    sessions = Sessions(make_gate())
    ask(sessions, hello())

    assert sessions.gone(PEER, "its connection ended") == []
