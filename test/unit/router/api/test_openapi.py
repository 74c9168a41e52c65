from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from aiohttp import web
from router_api import RouterApi, serving

from sgl_router_afd.api.openapi import document
from sgl_router_afd.app import build_app
from sgl_router_afd.config import RouterConfig

DOCS = Path(__file__).parents[4] / "docs" / "router-api.md"


@pytest.fixture(scope="module")
def app() -> web.Application:
    """All that the router serves."""
    config = RouterConfig()
    api = RouterApi(config)
    return build_app(config, api.fleet, api.counters.shared)


@pytest.fixture(scope="module")
def described(app: web.Application) -> Any:
    (route,) = [
        route
        for route in app.router.routes()
        if route.method == "GET" and route.resource and route.resource.canonical == "/openapi.json"
    ]
    return json.loads(_answer(route.handler))


def _answer(handler: Any) -> bytes:
    import asyncio

    response = asyncio.run(handler(None))
    return bytes(response.body)


def undescribed(app: web.Application, document: Any) -> list[str]:
    """Routes without a summary."""
    return [
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
        if not document["paths"]
        .get(route.resource.canonical, {})
        .get(route.method.lower(), {})
        .get("summary")
    ]


def test_every_route_of_the_router_is_described(app: web.Application, described: Any) -> None:
    assert len(list(app.router.routes())) > 20
    assert undescribed(app, described) == []


def test_a_route_without_a_docstring_is_found_out() -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/forgotten", handler)

    assert undescribed(app, document(app, [])) == ["GET /forgotten"]


def test_the_document_describes_nothing_that_does_not_exist(
    app: web.Application, described: Any
) -> None:
    from sgl_router_afd.endpoints import RELAYED

    there = {route.resource.canonical for route in app.router.routes() if route.resource}

    assert set(described["paths"]) - there - set(RELAYED) == set()


def test_every_reference_of_the_document_leads_somewhere(described: Any) -> None:
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))

    assert names and names <= described["components"]["schemas"].keys()


def test_every_schema_is_one_and_its_patterns_are_no_pythonisms(described: Any) -> None:
    schemas = described["components"]["schemas"]

    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert "\\\\Z" not in json.dumps(described)


def test_every_parameter_of_a_path_is_declared(described: Any) -> None:
    for path, operations in described["paths"].items():
        wanted = set(re.findall(r"{(\w+)}", path))
        for operation in operations.values():
            declared = {
                one["name"] for one in operation.get("parameters", []) if one["in"] == "path"
            }
            assert declared == wanted, path


def test_errors_have_openais_shape_also_for_what_is_not_there() -> None:
    with serving() as api:
        missing, wrong = api.ask("GET", "/nowhere"), api.ask("DELETE", "/health")

    assert missing.json["error"] == {
        "message": "there is no /nowhere here; see GET /openapi.json",
        "type": "not_found",
        "code": 404,
    }
    assert (wrong.status, wrong.headers["Allow"]) == (405, "GET, HEAD")
    assert "GET, HEAD, not DELETE" in wrong.error


def test_a_bug_of_ours_is_one_json_object_too(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_request: web.Request) -> web.Response:
        """Fails."""
        raise RuntimeError("the details")

    with serving(more=lambda app: app.router.add_get("/broken", broken) and None) as api:
        reply = api.runner.run(api._ask("GET", "/broken", None, {}))

    assert reply.status == 500
    assert "its log has the details" in reply.error and "the details" not in reply.error.replace(
        "has the details", ""
    )
    assert "RuntimeError: the details" in caplog.text


def test_the_page_of_the_docs_names_every_endpoint(described: Any) -> None:
    page = DOCS.read_text(encoding="utf-8")
    missing = [
        f"{method.upper()} {path}"
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
        if "security" in operation and f"`{method.upper()} {path}`" not in page
    ]

    assert missing == []
