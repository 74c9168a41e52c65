"""How servers and groups stand, each with a reason that a person understands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sgl_router_afd.control.group import Group
from sgl_router_afd.control.probe import Proof
from sgl_router_afd.control.registry import Entry
from sglang_afd.config import Role
from sglang_afd.protocol.registration import Condition


class Standing(StrEnum):
    """What one server is to the router."""

    SERVING = "serving"  # an attention server that may get requests, an MLP server that is well
    WAITING = "waiting"  # has not been ready since it came here
    DEGRADED = "degraded"  # keeps its streams and gets no new requests
    DRAINING = "draining"


class GroupState(StrEnum):
    """What one group is to the router; only READY gets requests."""

    FORMING = "forming"  # experts without a server, or no attention server
    WIRING = "wiring"  # complete; no attention server is proved yet
    READY = "ready"
    DEGRADED = "degraded"  # was ready, and may be again by itself
    DRAINING = "draining"
    DEAD = "dead"  # all servers of a role are gone


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Of one server."""

    standing: Standing
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class GroupStand:
    """Of one group."""

    state: GroupState
    reason: str


@dataclass(frozen=True, kw_only=True)
class Past:
    """What a group was before."""

    was_ready: bool = False  # ever
    was_covered: bool = False  # its experts, ever
    was_dead: bool = False  # and has not been ready since
    drain_reason: str = ""  # who asked the group to drain


def stand_of_attn(entry: Entry, group: Group, proof: tuple[Proof, str], now_s: float) -> Stand:
    """Of an attention server of a group.

    Args:
        entry: The server.
        group: Its group.
        proof: Of its pair, and why.
        now_s: The time.
    """
    report = entry.report
    if entry.is_draining:
        return Stand(standing=Standing.DRAINING, reason=entry.why_draining)
    absence = entry.absence(now_s)
    if absence:
        return Stand(standing=Standing.DEGRADED, reason=absence)
    if report.condition in (Condition.STALLED, Condition.DETACHED):
        reason = f"{report.condition}: {report.reason}"
        return Stand(standing=Standing.DEGRADED, reason=reason)
    if report.condition is not Condition.READY:
        why = f": {report.reason}" if report.reason else ""
        return Stand(standing=Standing.WAITING, reason=f"attaches to its MLP servers{why}")
    if not group.is_heard_by(entry):
        return Stand(standing=Standing.WAITING, reason=_why_not_wired(entry, group))
    kind, reason = proof
    if kind is Proof.PENDING:
        return Stand(standing=Standing.WAITING, reason=reason)
    if kind is Proof.BAD:
        return Stand(standing=Standing.DEGRADED, reason=reason)
    return Stand(standing=Standing.SERVING, reason=reason)


def stand_of_mlp(entry: Entry, now_s: float) -> Stand:
    """Of an MLP server of a group."""
    if entry.is_draining:
        return Stand(standing=Standing.DRAINING, reason=entry.why_draining)
    absence = entry.absence(now_s)
    if absence:
        return Stand(standing=Standing.DEGRADED, reason=absence)
    if entry.report.condition is Condition.READY:
        return Stand(standing=Standing.SERVING)
    is_new = entry.report.condition in (Condition.STARTING, Condition.LOADING)
    reason = entry.report.reason or f"is {entry.report.condition}"
    return Stand(standing=Standing.WAITING if is_new else Standing.DEGRADED, reason=reason)


def stand_of_group(group: Group, stands: Mapping[str, Stand], past: Past) -> GroupStand:
    """Of a group, from its servers.

    Args:
        group: Who belongs together.
        stands: Of each of its servers, by server id.
        past: What it was before.
    """
    drain = _group_drain(group, stands, past)
    if drain:
        return GroupStand(state=GroupState.DRAINING, reason=drain)
    extinct = _extinction(group, past)
    if extinct:
        return GroupStand(state=GroupState.DEAD, reason=extinct)
    was_ready = (past.was_ready and not past.was_dead) or _has_served(group)
    gap = group.gap or _whats_missing(group)
    if gap:
        state = GroupState.DEGRADED if was_ready else GroupState.FORMING
        return GroupStand(state=state, reason=gap)
    others = [_told(entry, stands) for entry in group.attn if not _serves(entry, stands)]
    num_serving = len(group.attn) - len(others)
    if num_serving == 0:
        state = GroupState.DEGRADED if was_ready else GroupState.WIRING
        return GroupStand(state=state, reason=_listed(others))
    # Attention servers prove more than the MLP servers' leases, so those are only mentioned.
    others += [_told(entry, stands) for entry in group.mlp.values() if not _serves(entry, stands)]
    reason = f"{num_serving} of {len(group.attn)} attention servers serve"
    return GroupStand(
        state=GroupState.READY, reason=f"{reason}; {_listed(others)}" if others else reason
    )


def stands_where_all_drain(
    group: Group, stands: Mapping[str, Stand], reason: str, *, was_asked: bool
) -> dict[str, Stand]:
    """Of the servers of a group that drains: those that are well drain with it.

    Args:
        group: Who belongs together.
        stands: Of each of its servers alone, by server id.
        reason: Why the group drains.
        was_asked: Whether the group as a whole was asked to. Else its MLP servers go on.
    """
    overruled = (Standing.SERVING, Standing.WAITING) if was_asked else (Standing.SERVING,)
    drains = Stand(standing=Standing.DRAINING, reason=f"{group.name} drains: {reason}")
    return {
        entry.server_id: drains
        if stands[entry.server_id].standing in overruled
        and (was_asked or entry.registration.role is Role.ATTN)
        else stands[entry.server_id]
        for entry in group.servers()
    }


def _group_drain(group: Group, stands: Mapping[str, Stand], past: Past) -> str:
    if past.drain_reason:
        return past.drain_reason
    draining = [
        entry for entry in group.servers() if stands[entry.server_id].standing is Standing.DRAINING
    ]
    for entry in draining:
        if entry.registration.role is Role.MLP:
            return f"its MLP server {_told(entry, stands)}"
    if group.attn and len(draining) == len(group.attn):
        return f"all its attention servers drain: {_told(draining[0], stands)}"
    return ""


def _extinction(group: Group, past: Past) -> str:
    if past.was_covered and not group.mlp and not group.wires_itself:
        return "all its MLP servers are gone; start them again, their attention servers attach then"
    if past.was_ready and not group.attn:
        return "all its attention servers are gone; start one, its MLP servers wait for it"
    return ""


def _whats_missing(group: Group) -> str:
    if not group.attn:
        return "no attention server has joined it; start one, or look at --ratio"
    return ""


def _has_served(group: Group) -> bool:
    """Was it ready under an earlier router? A server that has lost MLP servers had some."""
    lost = (Condition.STALLED, Condition.DETACHED)
    return any(entry.report.condition in lost for entry in group.attn)


def _serves(entry: Entry, stands: Mapping[str, Stand]) -> bool:
    return stands[entry.server_id].standing is Standing.SERVING


def _told(entry: Entry, stands: Mapping[str, Stand]) -> str:
    stand = stands[entry.server_id]
    return f"{entry.server_id} is {stand.standing} ({stand.reason})"


def _listed(others: Sequence[str]) -> str:
    shown = "; ".join(others[:4])
    return shown if len(others) <= 4 else f"{shown}; and {len(others) - 4} more"


def _why_not_wired(entry: Entry, group: Group) -> str:
    heard = set(entry.report.attached)
    missing = [
        f"{other.server_id} (rank {rank})"
        for rank, other in sorted(group.mlp.items())
        if other.boot_id not in heard
    ]
    if missing:
        return f"is not attached to {', '.join(missing)} of its group yet"
    return "is attached to MLP servers that its group does not have"
