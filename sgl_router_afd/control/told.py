"""What each server is to be told: its group, where its MLP servers are, whether it may end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl_router_afd.control.groups import Groups, View
from sgl_router_afd.control.registry import Entry
from sgl_router_afd.control.standing import GroupState, Standing
from sglang_afd.config import Role


@dataclass(frozen=True, kw_only=True)
class Told:
    """The part of a lease that is decided here."""

    group: str
    epoch: int
    mlp_urls: tuple[str, ...]
    reason: str
    is_draining: bool
    may_stop: bool


def tell(entry: Entry, groups: Groups, num_in_flight: Callable[[str], int]) -> Told:
    """What one server is to be told now.

    Args:
        entry: The server.
        groups: All groups.
        num_in_flight: Requests of this router at an attention server, which its last report may
            not know of yet.
    """
    view = groups.of(entry.server_id)
    is_draining = entry.is_draining or _drains_as_a_whole(view)
    return Told(
        group=view.name if view else "",
        epoch=view.epoch if view else 0,
        mlp_urls=_mlp_urls(entry, view),
        reason=_reason(entry, view, groups),
        is_draining=is_draining,
        may_stop=is_draining and not _is_needed(entry, view, num_in_flight),
    )


def _mlp_urls(entry: Entry, view: View | None) -> tuple[str, ...]:
    # What the command line names stays in force: the server may know better how to get there.
    if view is None or entry.registration.peer_urls:
        return ()
    leader = view.group.mlp.get(0)
    if leader is not None and leader.server_id == entry.server_id:
        return ()
    return view.group.mlp_urls


def _reason(entry: Entry, view: View | None, groups: Groups) -> str:
    if view is None:
        return groups.homeless.get(entry.server_id, "")
    stand = view.stands[entry.server_id]
    if stand.standing is not Standing.SERVING:
        return stand.reason
    if view.stand.state is GroupState.READY:
        return ""
    return f"{view.name} is {view.stand.state}: {view.stand.reason}"


def _is_needed(entry: Entry, view: View | None, num_in_flight: Callable[[str], int]) -> bool:
    if entry.registration.role is Role.ATTN:
        return _is_busy(entry, num_in_flight)
    return view is not None and any(_is_busy(attn, num_in_flight) for attn in view.group.attn)


def _is_busy(entry: Entry, num_in_flight: Callable[[str], int]) -> bool:
    load = entry.report.load
    return load.num_running + load.num_waiting + num_in_flight(entry.server_id) > 0


def _drains_as_a_whole(view: View | None) -> bool:
    return view is not None and view.drain_reason != ""
