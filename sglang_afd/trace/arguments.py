"""What the events that exchanges and replays are read from have to carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

# Forty years of microseconds: sums of times stay finite, and nanoseconds stay exact enough.
Microseconds = Annotated[float, msgspec.Meta(ge=-1.3e15, le=1.3e15)]
_Number = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
_Rank = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,4}$")]


class _InStep(msgspec.Struct):
    step: _Number


class _Step(_InStep):
    kind: str


class _InLayer(_InStep):
    layer: _Number


class _Exchange(_InLayer):
    micro_batch: _Number
    epoch: str


class _Dispatch(_Exchange):
    rows: _Number


class _Combine(_Exchange):
    received_us: dict[_Rank, Microseconds]


class _Member(msgspec.Struct):
    peer: str
    epoch: str
    step: _Number
    micro_batch: _Number
    arrived_us: Microseconds | None
    replied_us: Microseconds | None


class _Run(msgspec.Struct):
    layer: _Number
    micro_batch: _Number
    kind: str
    rows: _Number
    members: list[_Member]


_WANTED: Mapping[str, type[msgspec.Struct]] = {
    "step": _Step,
    "stall": _InStep,
    "head": _InStep,
    "attention": _InLayer,
    "wait": _InLayer,
    "dispatch": _Dispatch,
    "combine": _Combine,
    "run": _Run,
}


def check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raises: msgspec.ValidationError, naming the field, when an event cannot be what it says."""
    # `step 7 (decode)`; events that somebody else added say what they like.
    wanted = _WANTED.get("step" if name.startswith("step ") else name)
    if wanted is not None:
        msgspec.convert(arguments, wanted)
