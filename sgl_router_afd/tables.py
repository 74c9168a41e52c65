"""What the relay processes need to know of the control plane, as one table (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl_router_afd.control.plane import ControlPlane
from sgl_router_afd.control.registry import Entry
from sgl_router_afd.control.routing import Candidates, Hold, NoRoute, Route
from sgl_router_afd.control.standing import Stand
from sgl_router_afd.dataplane.messages import UNPLACED, ModelRow, ServerRow, Table
from sglang_afd.config import Role

SlotOf = Callable[[str], int | None]


def attention_servers(plane: ControlPlane) -> list[Entry]:
    """Those that requests may go to, now or later."""
    return [entry for entry in plane.registry if entry.registration.role is Role.ATTN]


def stands(plane: ControlPlane) -> dict[str, Stand]:
    """How each server stands that has a group."""
    return {
        server_id: stand
        for view in plane.groups.views.values()
        for server_id, stand in view.stands.items()
    }


def build_table(
    plane: ControlPlane, slot_of: SlotOf, unheard: Sequence[tuple[str, str]] = ()
) -> Table:
    """The table of now.

    Args:
        plane: What is decided.
        slot_of: The slot of a server; one without is left out.
        unheard: URL and reason of servers that never answered, for clients that ask in vain.
    """
    standing = stands(plane)
    rows = [
        _row(entry, slot, standing.get(entry.server_id), plane)
        for entry in attention_servers(plane)
        if (slot := slot_of(entry.server_id)) is not None
    ]
    names = {name: None for view in plane.groups.views.values() for name in view.models}

    def model_row(model: str | None) -> ModelRow:
        return _model_row(plane.route(model), slot_of, "" if names else _listed(unheard))

    return Table(
        rows=tuple(rows),
        models={name: model_row(name) for name in names},
        unnamed=model_row(None),
        unknown=model_row(""),  # no model has that name
    )


def _row(entry: Entry, slot: int, stand: Stand | None, plane: ControlPlane) -> ServerRow:
    load, capacity = entry.report.load, entry.registration.capacity
    homeless = plane.groups.homeless.get(entry.server_id, "")
    return ServerRow(
        slot=slot,
        server_id=entry.server_id,
        url=entry.registration.url,
        state=UNPLACED if stand is None else stand.standing.value,
        reason=homeless if stand is None else stand.reason,
        num_reported=load.num_running + load.num_waiting,
        num_in_flight_then=entry.num_in_flight_then,
        max_running=capacity.max_running_requests,
        free_kv_tokens=load.free_kv_tokens,
        kv_tokens=capacity.kv_tokens,
    )


def _model_row(route: Route, slot_of: SlotOf, more: str) -> ModelRow:
    match route:
        case Candidates():
            slots = [slot_of(server_id) for server_id in route.server_ids]
            # Where all of these turn out to be away, the next table says what follows.
            return ModelRow(slots=tuple(s for s in slots if s is not None), may_wait=True)
        case Hold():
            return ModelRow(slots=(), may_wait=True, reason=route.reason + more)
        case NoRoute():
            return ModelRow(slots=(), http_status=route.http_status, reason=route.reason + more)


def _listed(unheard: Sequence[tuple[str, str]]) -> str:
    return "".join(f"; {url}: {reason}" for url, reason in unheard[:8])
