"""What the leading rank tells the others of each decode unit, before it runs (pure)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from sglang_afd.rounds.units import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedMember:
    """One exchange of the unit; the epoch names its peer, since connections differ by rank."""

    epoch: int
    micro_batch_id: int
    step: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitOrder:
    """The decode unit that comes next on every rank."""

    sequence: int
    layer_id: int
    micro_batch_id: int
    members: tuple[OrderedMember, ...]


def order_of(unit: Unit, epochs: Mapping[Hashable, int]) -> UnitOrder:
    """The order that makes other ranks run `unit`; `epochs` has the attachment of each peer."""
    return UnitOrder(
        sequence=unit.sequence,
        layer_id=unit.layer_id,
        micro_batch_id=unit.micro_batch_id,
        members=tuple(
            OrderedMember(
                epoch=epochs[member.peer],
                micro_batch_id=member.micro_batch_id,
                step=member.step,
                num_rows=member.num_rows,
            )
            for member in unit.members
        ),
    )
