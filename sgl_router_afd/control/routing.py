"""Which servers may get a request for a model, and what to answer where none may."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus

from sgl_router_afd.control.groups import View
from sgl_router_afd.control.registry import Entry


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


def route(
    model: str | None,
    views: Iterable[View],
    *,
    is_settled: bool = True,
    is_there: Callable[[Entry], bool] = lambda entry: True,
) -> Route:
    """Find the servers for one request.

    Args:
        model: As the request says; None where it says none, as `/generate` does.
        views: All groups.
        is_settled: Whether everybody had time to register again after the router's start.
        is_there: Whether this process is registered; groups may have to stay as they were.
    """
    with_name = [view for view in views if view.models]
    if not with_name:
        return Hold(reason="no attention server has joined a group yet")
    fitting = _fitting(model, with_name)
    if isinstance(fitting, NoRoute):
        if fitting.http_status == HTTPStatus.NOT_FOUND and not is_settled:
            return Hold(reason=f"{fitting.reason} yet, and this router was started a moment ago")
        return fitting
    ready = [
        entry.server_id
        for view in fitting
        for entry in view.with_traffic()
        if is_there(entry) and (model is None or model in entry.registration.models)
    ]
    if ready:
        return Candidates(server_ids=tuple(ready))
    reason = "; ".join(
        f"{view.name} is {view.stand.state}: {view.stand.reason}" for view in fitting
    )
    if any(view.may_recover or view.with_traffic() for view in fitting):
        return Hold(reason=reason)
    return NoRoute(http_status=503, reason=reason)


def _fitting(model: str | None, views: list[View]) -> list[View] | NoRoute:
    # A group without any server speaks for its model only where no other does.
    populated = [view for view in views if view.stands]
    if model is not None:
        for some in (populated, views):
            if found := [view for view in some if model in view.models]:
                return found
        what = f"model {model!r}" if model else "such model"
        reason = f"there is no {what} here; there is {_names(views)}"
        return NoRoute(http_status=404, reason=reason)
    if len({view.group.shape.fingerprint for view in populated or views}) > 1:
        return NoRoute(
            http_status=400,
            reason="the request names no model and this router has several: "
            f"{_names(populated or views)}; name one",
        )
    return populated or views


def _names(views: list[View]) -> str:
    return ", ".join(sorted({name for view in views for name in view.models}))
