"""Messages to frames and back; the only decoder that bytes from a peer ever reach."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from sglang_afd.errors import ProtocolError
from sglang_afd.protocol.messages import FromDoor, ToAttn, ToDoor, ToFollower, ToMlp
from sglang_afd.protocol.version import MAGIC, PROTOCOL_VERSION

MAX_CONTROL_BYTES = 64 * 1024
_PREFIX = MAGIC + bytes([PROTOCOL_VERSION])

AnyMessage = ToMlp | ToAttn | ToFollower | ToDoor | FromDoor

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_to_mlp = msgspec.msgpack.Decoder(ToMlp)
_to_attn = msgspec.msgpack.Decoder(ToAttn)
_to_follower = msgspec.msgpack.Decoder(ToFollower)
_to_door = msgspec.msgpack.Decoder(ToDoor)
_from_door = msgspec.msgpack.Decoder(FromDoor)


def encode(message: AnyMessage) -> bytes:
    """One control frame: magic, version byte, msgpack."""
    return _PREFIX + _encoder.encode(message)


def decode_to_mlp(frame: bytes | memoryview) -> ToMlp:
    """Decode what an attention server sent.

    Raises:
        ProtocolError: Not ours, another version, too long, or not a known message.
    """
    return _decode(frame, _to_mlp)


def decode_to_attn(frame: bytes | memoryview) -> ToAttn:
    """Decode what an MLP server sent; errors as in `decode_to_mlp`."""
    return _decode(frame, _to_attn)


def decode_to_follower(frame: bytes | memoryview) -> ToFollower:
    """Decode what rank 0 sent to another rank; errors as in `decode_to_mlp`."""
    return _decode(frame, _to_follower)


def decode_to_door(frame: bytes | memoryview) -> ToDoor:
    """Decode what came to an MLP server's door; errors as in `decode_to_mlp`."""
    return _decode(frame, _to_door)


def decode_from_door(frame: bytes | memoryview) -> FromDoor:
    """Decode what an MLP server's door answered; errors as in `decode_to_mlp`."""
    return _decode(frame, _from_door)


def _decode(frame: bytes | memoryview, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    view = memoryview(frame)
    if len(view) > MAX_CONTROL_BYTES:
        raise ProtocolError(
            f"control frame of {len(view)} bytes; at most {MAX_CONTROL_BYTES} are allowed"
        )
    prefix = bytes(view[: len(_PREFIX)])
    if prefix[: len(MAGIC)] != MAGIC or len(prefix) < len(_PREFIX):
        raise ProtocolError(
            "control frame does not begin with the sglang-afd mark; "
            "is something else connected to this exchange address?"
        )
    if prefix != _PREFIX:
        raise ProtocolError(
            f"peer speaks protocol version {prefix[-1]}, this side speaks {PROTOCOL_VERSION}; "
            f"install the same sglang-afd on both"
        )
    try:
        return decoder.decode(view[len(_PREFIX) :])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"control frame does not parse: {error}") from None
