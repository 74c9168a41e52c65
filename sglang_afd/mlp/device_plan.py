"""A unit of the rounds as the launches that it takes (pure)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from sglang_afd.mlp.device_units import Launch
from sglang_afd.rounds.units import Member, Unit
from sglang_afd.transport.cuda_ipc.unit_ring import UnitMemberRef


def parts_of(unit: Unit, max_rows: int) -> list[list[Member]]:
    """Cut a unit where the staging buffers end; no exchange has more rows than they hold."""
    if unit.num_rows <= max_rows:
        return [list(unit.members)]
    parts: list[list[Member]] = []
    num_rows = 0
    for member in unit.members:
        if not parts or num_rows + member.num_rows > max_rows:
            parts.append([])
            num_rows = 0
        parts[-1].append(member)
        num_rows += member.num_rows
    return parts


def launch_of(unit: Unit, members: Sequence[Member], peers: Mapping[Hashable, int]) -> Launch:
    """How to launch a part of `unit`; `peers` has the place of each in the table."""
    return Launch(
        layer_id=unit.layer_id,
        members=[_reference(member, peers) for member in members],
        num_rows=unit.num_rows if unit.is_prefill else sum([each.num_rows for each in members]),
        first_row=unit.first_row,
        is_piece=unit.is_prefill,
        is_last_piece=unit.is_last_piece,
    )


def _reference(member: Member, peers: Mapping[Hashable, int]) -> UnitMemberRef:
    return UnitMemberRef(
        peer_index=peers[member.peer],
        slot=member.micro_batch_id,
        num_rows=member.num_rows,
    )
