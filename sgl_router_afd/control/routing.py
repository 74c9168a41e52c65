"""Which servers may get a request for a model, and what to answer where none may."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sgl_router_afd.control.groups import View
from sgl_router_afd.control.standing import GroupState

# States that pass by themselves, so that a request can wait for what comes after.
PASSING = (GroupState.WIRING, GroupState.DEGRADED)


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Any of these may get the request."""

    server_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Nobody may get it now; it can wait for a while."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class NoRoute:
    """Nobody may get it."""

    http_status: int
    reason: str


Route = Candidates | Hold | NoRoute


def route(model: str | None, views: Iterable[View]) -> Route:
    """Find the servers for one request.

    Args:
        model: As the request says; None where it says none, as `/generate` does.
        views: All groups.
    """
    by_model: dict[str, list[View]] = {}
    for view in views:
        for name in view.models():
            by_model.setdefault(name, []).append(view)
    if not by_model:
        return Hold(reason="no attention server has joined a group yet")
    fitting = _fitting(model, by_model)
    if isinstance(fitting, NoRoute):
        return fitting
    ready = [
        entry.server_id
        for view in fitting
        for entry in view.with_traffic()
        if model is None or model in entry.registration.models
    ]
    if ready:
        return Candidates(server_ids=tuple(ready))
    reason = "; ".join(
        f"{view.name} is {view.stand.state}: {view.stand.reason}" for view in fitting
    )
    if any(view.stand.state in PASSING for view in fitting):
        return Hold(reason=reason)
    return NoRoute(http_status=503, reason=reason)


def _fitting(model: str | None, by_model: dict[str, list[View]]) -> list[View] | NoRoute:
    known = ", ".join(sorted(by_model))
    if model is not None:
        if model not in by_model:
            what = f"model {model!r}" if model else "such model"
            return NoRoute(http_status=404, reason=f"there is no {what} here; there is {known}")
        return by_model[model]
    everything = {view.name: view for views in by_model.values() for view in views}
    if len({view.group.shape.fingerprint for view in everything.values()}) > 1:
        return NoRoute(
            http_status=400,
            reason=f"the request names no model and this router has several: {known}; name one",
        )
    return list(everything.values())
