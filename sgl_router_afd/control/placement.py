"""Which server belongs to which group; computed anew whenever somebody came, went or changed.

What is known of a server's connections decides first, then its command line, then where it was:
here, by its last lease of an earlier router, or by what that router saved. A server that none of
these places goes to where one is needed. So whoever has a place keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgl_router_afd.control.group import Group, is_displaced
from sgl_router_afd.control.place_attn import AttnPlacer
from sgl_router_afd.control.place_mlp import MlpPlacer
from sgl_router_afd.control.places import Memory, Placement
from sgl_router_afd.control.ratio import Ratio
from sgl_router_afd.control.registry import Entry
from sglang_afd.config import Role


def place(entries: Iterable[Entry], memory: Memory, ratio: Ratio | None) -> Placement:
    """Put every server into one group, or say why it is in none.

    Args:
        entries: In the order of their registration.
        memory: What was decided before.
        ratio: Attention to MLP servers, or None to keep groups even.
    """
    # Those that have a place keep it before others ask; rank 0 goes before the ranks it names.
    # Those that others displace take what is left.
    everybody = sorted(
        entries,
        key=lambda entry: (
            is_displaced(entry),
            entry.server_id not in memory.group_of,
            _rank(entry),
            entry.order,
        ),
    )
    placement = Placement(
        groups={name: Group(name=name, shape=shape) for name, shape in memory.shapes.items()},
        homeless={},
    )
    mlp_placer = MlpPlacer(placement, memory)
    for entry in everybody:
        if entry.registration.role is Role.MLP:
            mlp_placer.place(entry)
    attn_placer = AttnPlacer(placement, memory, ratio, mlp_placer.contacts)
    for entry in sorted(everybody, key=memory.is_usurper):
        if entry.registration.role is Role.ATTN:
            attn_placer.place(entry)
    return placement


def _rank(entry: Entry) -> int:
    shard = entry.registration.shard
    return shard.ep_rank if shard is not None else -1
