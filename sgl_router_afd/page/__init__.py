"""`GET /`: the status page of the router, one HTML document that needs nothing else."""

from __future__ import annotations

from aiohttp import web

from sgl_router_afd.page.document import Document, load

PATH = "/"

__all__ = ["PATH", "add_routes"]


def add_routes(app: web.Application) -> None:
    """Serve the page; it asks `/afd/v1/groups` of the same address for what it shows."""
    document = load()

    async def page(request: web.Request) -> web.Response:
        """The status page, for people."""
        return _answer(document, request)

    app.router.add_get(PATH, page)


def _answer(document: Document, request: web.Request) -> web.Response:
    if document.etag in (tag.value for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=document.headers)
    return web.Response(body=document.body, headers=document.headers)
