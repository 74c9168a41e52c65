from __future__ import annotations

import typing
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peers import SPEC

from sglang_afd.config import MAX_PEERS
from sglang_afd.errors import ProtocolError
from sglang_afd.protocol import codec
from sglang_afd.protocol.messages import (
    Attach,
    Attached,
    Challenge,
    Combine,
    Detach,
    Dispatch,
    Failed,
    FromDoor,
    Hello,
    Kind,
    OpenSlots,
    Refusal,
    RefusalCode,
    RunUnit,
    SlotsOpened,
    StepIntent,
    ToAttn,
    ToFollower,
    ToMlp,
    UnitMember,
    Withdrawal,
)
from sglang_afd.protocol.version import PROTOCOL_VERSION

PREFIX = b"AFD\x03"
PLACE = {"epoch": 7, "step": 3, "layer_id": 1, "micro_batch_id": 0}
PLACE_BYTES = b"\xa5epoch\x07\xa4step\x03\xa8layer_id\x01\xaemicro_batch_id\x00"
SPEC_BYTES = (
    b"\x8c\xafpackage_version\xa50.1.0\xaesglang_version\xa60.5.17\xabfingerprint\xd9@"
    + b"ab" * 32
    + b"\xacarchitecture\xb3Qwen3MoeForCausalLM\xa5dtype\xa7float32\xabhidden_size\x04"
    b"\xa5top_k\x02\xabnum_experts\x06\xadmoe_layer_ids\x93\x00\x01\x03\xa8max_rows\x05"
    b"\xa9transport\xa3zmq\xaedispatch_dtype\xa7float32"
)

# NOTE: a change here is a change of the wire; raise PROTOCOL_VERSION with it.
GOLDEN: list[tuple[codec.AnyMessage, bytes]] = [
    (
        Hello(server_id="attn-0", nonce=b"nnnn", has_secret=True),
        b"\x84\xa4type\xa5hello\xa9server_id\xa6attn-0\xa5nonce\xc4\x04nnnn\xaahas_secret\xc3",
    ),
    (
        Attach(spec=SPEC, epoch=7, proof=b"pppp", follower_rank=-1),
        b"\x85\xa4type\xa6attach\xa4spec" + SPEC_BYTES + b"\xa5epoch\x07\xa5proof\xc4\x04pppp"
        b"\xadfollower_rank\xff",
    ),
    (Detach(epoch=7), b"\x82\xa4type\xa6detach\xa5epoch\x07"),
    (
        Dispatch(**PLACE, num_rows=2, kind=Kind.DECODE, num_micro_batches=1),
        b"\x88\xa4type\xa8dispatch" + PLACE_BYTES + b"\xa8num_rows\x02\xa4kind\xa6decode"
        b"\xb1num_micro_batches\x01",
    ),
    (
        StepIntent(epoch=7, step=4, num_rows=9, num_micro_batches=2, kind=Kind.PREFILL),
        b"\x86\xa4type\xabstep_intent\xa5epoch\x07\xa4step\x04\xa8num_rows\x09"
        b"\xb1num_micro_batches\x02\xa4kind\xa7prefill",
    ),
    (
        Withdrawal(epoch=7, step=4),
        b"\x83\xa4type\xaawithdrawal\xa5epoch\x07\xa4step\x04",
    ),
    (
        RunUnit(
            sequence=5,
            layer_id=1,
            micro_batch_id=0,
            members=(UnitMember(epoch=7, step=3, micro_batch_id=0, num_rows=2),),
        ),
        b"\x85\xa4type\xa8run_unit\xa8sequence\x05\xa8layer_id\x01\xaemicro_batch_id\x00\xa7members\x91"
        b"\x84\xa5epoch\x07\xa4step\x03\xaemicro_batch_id\x00\xa8num_rows\x02",
    ),
    (
        Challenge(nonce=b"nnnn", proof=b"pppp"),
        b"\x83\xa4type\xa9challenge\xa5nonce\xc4\x04nnnn\xa5proof\xc4\x04pppp",
    ),
    (
        Attached(
            epoch=7, rank=1, ep_size=2, first_expert=3, stop_expert=6, boot_id="00ff", door="/d"
        ),
        b"\x88\xa4type\xa8attached\xa5epoch\x07\xa4rank\x01\xa7ep_size\x02"
        b"\xacfirst_expert\x03\xabstop_expert\x06\xa7boot_id\xa400ff\xa4door\xa2/d",
    ),
    (
        Refusal(code=RefusalCode.MODEL, message="no"),
        b"\x83\xa4type\xa7refusal\xa4code\xa5model\xa7message\xa2no",
    ),
    (
        Combine(**PLACE, num_rows=2),
        b"\x86\xa4type\xa7combine" + PLACE_BYTES + b"\xa8num_rows\x02",
    ),
    (
        Failed(**PLACE, code=RefusalCode.EXPERT, message="no"),
        b"\x87\xa4type\xa6failed" + PLACE_BYTES + b"\xa4code\xa6expert\xa7message\xa2no",
    ),
    (
        OpenSlots(
            server_id="attn-0",
            epoch=7,
            num_slots=2,
            max_ranks=8,
            max_rows=5,
            hidden_size=4,
            top_k=2,
            dtype="float32",
            is_fp8=False,
        ),
        b"\x8a\xa4type\xaaopen_slots\xa9server_id\xa6attn-0\xa5epoch\x07\xa9num_slots\x02"
        b"\xa9max_ranks\x08\xa8max_rows\x05\xabhidden_size\x04\xa5top_k\x02\xa5dtype\xa7float32"
        b"\xa6is_fp8\xc2",
    ),
    (SlotsOpened(epoch=7), b"\x82\xa4type\xacslots_opened\xa5epoch\x07"),
]
DECODERS = (
    codec.decode_to_mlp,
    codec.decode_to_attn,
    codec.decode_to_follower,
    codec.decode_to_door,
    codec.decode_from_door,
)
UNIONS = (ToMlp, ToAttn, ToFollower, FromDoor)
NAMES = [type(message).__name__ for message, _ in GOLDEN]


def decoder_of(message: object) -> Callable[[bytes], codec.AnyMessage]:
    if isinstance(message, RunUnit):
        return codec.decode_to_follower
    if isinstance(message, OpenSlots):
        return codec.decode_to_door
    if isinstance(message, SlotsOpened):
        return codec.decode_from_door
    return codec.decode_to_mlp if isinstance(message, ToMlp) else codec.decode_to_attn


def test_a_unit_of_as_many_peers_as_may_attach_fits_into_a_frame() -> None:
    biggest = 2**63 - 1
    member = UnitMember(epoch=biggest, step=biggest, micro_batch_id=3, num_rows=65536)
    members = (member,) * MAX_PEERS
    order = RunUnit(sequence=biggest, layer_id=65535, micro_batch_id=3, members=members)

    assert codec.decode_to_follower(codec.encode(order)) == order


def test_every_message_stands_in_the_golden_table() -> None:
    every = {OpenSlots} | {kind for union in UNIONS for kind in typing.get_args(union)}

    assert {type(message) for message, _ in GOLDEN} == every


def test_the_golden_bytes_are_those_of_this_protocol_version() -> None:
    assert PROTOCOL_VERSION == 3


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_a_message_is_written_as_its_golden_bytes(message: codec.AnyMessage, body: bytes) -> None:
    assert codec.encode(message) == PREFIX + body


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_golden_bytes_are_read_as_their_message(message: codec.AnyMessage, body: bytes) -> None:
    assert decoder_of(message)(PREFIX + body) == message


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_a_message_is_read_from_a_view_as_from_bytes(
    message: codec.AnyMessage, body: bytes
) -> None:
    assert decoder_of(message)(memoryview(PREFIX + body)) == message


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_a_message_of_the_other_direction_is_refused(
    message: codec.AnyMessage, body: bytes
) -> None:
    decode = codec.decode_to_attn if isinstance(message, ToMlp) else codec.decode_to_mlp

    with pytest.raises(ProtocolError, match="does not parse: Invalid value"):
        decode(PREFIX + body)


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_every_truncation_is_refused(message: codec.AnyMessage, body: bytes) -> None:
    frame = PREFIX + body

    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            decoder_of(message)(frame[:length])


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_bytes_after_a_message_are_refused(message: codec.AnyMessage, body: bytes) -> None:
    with pytest.raises(ProtocolError, match="trailing"):
        decoder_of(message)(PREFIX + body + b"\x00")


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_an_unknown_field_is_refused(message: codec.AnyMessage, body: bytes) -> None:
    fields = msgspec.msgpack.decode(body) | {"more": 1}

    with pytest.raises(ProtocolError, match="unknown field `more`"):
        decoder_of(message)(PREFIX + msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(("message", "body"), GOLDEN, ids=NAMES)
def test_every_missing_field_is_refused(message: codec.AnyMessage, body: bytes) -> None:
    fields = msgspec.msgpack.decode(body)

    # What is alone in its direction is known without its name.
    for name in fields.keys() - ({"type"} if isinstance(message, OpenSlots) else set()):
        rest = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(ProtocolError):
            decoder_of(message)(PREFIX + msgspec.msgpack.encode(rest))


@pytest.mark.parametrize("frame", [b"", b"A", b"AFD", b"GET / HTTP/1.1\r\n", b"\0" * 64])
def test_what_is_not_ours_is_refused_as_that(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"does not begin with the sglang-afd mark"):
        codec.decode_to_mlp(frame)


@pytest.mark.parametrize("version", [0, 1, 255])
def test_another_version_is_refused_with_both_versions(version: int) -> None:
    frame = b"AFD" + bytes([version]) + GOLDEN[0][1]

    with pytest.raises(ProtocolError, match=rf"version {version}, this side speaks 3; install"):
        codec.decode_to_mlp(frame)


def test_the_longest_frame_is_read_and_one_byte_more_is_refused() -> None:
    overhead = len(codec.encode(Refusal(code=RefusalCode.MODEL, message="x" * 300))) - 300
    longest = Refusal(code=RefusalCode.MODEL, message="x" * (codec.MAX_CONTROL_BYTES - overhead))
    longer = Refusal(code=RefusalCode.MODEL, message=longest.message + "x")

    assert codec.decode_to_attn(codec.encode(longest)) == longest
    with pytest.raises(ProtocolError, match="of 65537 bytes; at most 65536 are allowed"):
        codec.decode_to_attn(codec.encode(longer))


@pytest.mark.parametrize("decode", DECODERS)
def test_text_that_is_not_utf8_is_refused(decode: Callable[[bytes], object]) -> None:
    body = b"\x84\xa4type\xa5hello\xa9server_id\xa2\xff\xfe\xa5nonce\xc4\x00\xaahas_secret\xc3"

    with pytest.raises(ProtocolError):
        decode(PREFIX + body)


@pytest.mark.parametrize("decode", DECODERS)
def test_deep_nesting_is_refused(decode: Callable[[bytes], object]) -> None:
    for opening in (b"\x91", b"\x81\xa1x"):
        with pytest.raises(ProtocolError):
            decode(PREFIX + b"\x82\xa4type\xa6attach\xa4spec" + opening * 20_000)


def read(decode: Callable[[bytes], object], frame: bytes) -> object | None:
    try:
        return decode(frame)
    except ProtocolError:
        return None


@given(frame=st.binary(max_size=256) | st.binary(max_size=256).map(PREFIX.__add__))
def test_arbitrary_bytes_raise_nothing_but_a_protocol_error(frame: bytes) -> None:
    for decode in DECODERS:
        read(decode, frame)


@given(
    index=st.integers(0, len(GOLDEN) - 1),
    edits=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_a_damaged_message_raises_nothing_but_a_protocol_error(
    index: int, edits: list[tuple[int, int]]
) -> None:
    message, body = GOLDEN[index]
    frame = bytearray(PREFIX + body)
    for position, value in edits:
        frame[position % len(frame)] = value

    result = read(decoder_of(message), bytes(frame))

    assert result is None or isinstance(result, codec.AnyMessage)


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(tag=st.sampled_from(["hello", "attach", "dispatch", "failed", "x"]), fields=_values)
def test_sound_msgpack_of_another_shape_raises_nothing_but_a_protocol_error(
    tag: str, fields: object
) -> None:
    body = {"type": tag} | fields if isinstance(fields, dict) else fields
    frame = PREFIX + msgspec.msgpack.encode(body)

    for decode in DECODERS:
        read(decode, frame)
