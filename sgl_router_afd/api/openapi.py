"""The OpenAPI document, made of the endpoints, their structs and the other routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, get_args

import msgspec
from aiohttp import web

from sgl_router_afd.api.endpoint import Access, Endpoint
from sgl_router_afd.api.shapes import ErrorAnswer
from sgl_router_afd.endpoints import RELAYED, RELAYED_POST
from sglang_afd import __version__
from sglang_afd.protocol.signature import SIGNATURE_HEADER

OPENAPI_VERSION = "3.1.0"
REF = "#/components/schemas/{name}"
JSON = "application/json"
ACCESS_ERRORS = {
    Access.OPEN: (),
    Access.CLIENT: (401,),
    Access.READ: (401,),
    Access.CHANGE: (401, 403),
    Access.SERVER: (403,),
}
SECURITY: dict[Access, list[dict[str, list[str]]]] = {
    Access.OPEN: [],
    Access.CLIENT: [{"client_key": []}, {}],
    Access.READ: [{"admin_key": []}, {}],
    Access.CHANGE: [{"admin_key": []}, {}],
    Access.SERVER: [{"server_signature": []}, {}],
}
SCHEMES = {
    "client_key": {
        "type": "http",
        "scheme": "bearer",
        "description": "--api-key of the router; not asked for where it has none",
    },
    "admin_key": {
        "type": "http",
        "scheme": "bearer",
        "description": "--admin-api-key of the router; without one, reading is open and changes "
        "are for routers that listen on a loopback address",
    },
    "server_signature": {
        "type": "apiKey",
        "in": "header",
        "name": SIGNATURE_HEADER,
        "description": "hex HMAC-SHA256 of the body with --afd-secret-file; not asked for where "
        "the router has none",
    },
}
Paths = dict[str, dict[str, Any]]


def document(app: web.Application, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Describe every route of the application, and what the relay hands to servers.

    Args:
        app: A route of it that is no endpoint is described by its handler's docstring.
        endpoints: Described from what they declare.
    """
    endpoints = tuple(endpoints)
    kinds = _structs(endpoints)
    _, components = msgspec.json.schema_components(kinds, ref_template=REF)
    paths: Paths = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    for method, path, text in _other_routes(app):
        paths.setdefault(path, {}).setdefault(method, _plain_operation(text, path))
    _add_relayed(paths)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "sglang-afd router", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": _portable(components), "securitySchemes": SCHEMES},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    errors = {*endpoint.errors, *ACCESS_ERRORS[endpoint.access]}
    if endpoint.takes is not None:
        errors |= {400, 413}
    answers = {status: _answer(status, kind) for status, kind in endpoint.answers.items()}
    answers |= {status: _answer(status, ErrorAnswer) for status in errors if status not in answers}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "security": SECURITY[endpoint.access],
        "responses": {str(status): answers[status] for status in sorted(answers)},
    }
    parameters = [
        *_path_parameters(endpoint.path),
        *(
            {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
            for name, text in endpoint.query.items()
        ),
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.takes is not None:
        operation["requestBody"] = {
            "required": endpoint.needs_body,
            "content": {JSON: {"schema": _schema(endpoint.takes)}},
        }
    return operation


def _plain_operation(text: str, path: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": text,
        "responses": {"200": {"description": "as the summary says"}},
    }
    parameters = _path_parameters(path)
    return operation | ({"parameters": parameters} if parameters else {})


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _answer(status: int, kind: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if kind is not None:
        answer["content"] = {JSON: {"schema": _schema(kind)}}
    return answer


def _schema(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=REF)
    return schema


def _structs(endpoints: Iterable[Endpoint]) -> list[Any]:
    kinds: list[Any] = [ErrorAnswer]
    for endpoint in endpoints:
        for kind in (endpoint.takes, *endpoint.answers.values()):
            kinds += get_args(kind) or [kind] if kind is not None else []
    return [kind for kind in dict.fromkeys(kinds) if issubclass(kind, msgspec.Struct)]


def _other_routes(app: web.Application) -> Iterable[tuple[str, str, str]]:
    for route in app.router.routes():
        if route.resource is None or route.method == "HEAD":
            continue
        first_line = (route.handler.__doc__ or "").strip().partition("\n")[0]
        yield route.method.lower(), route.resource.canonical, first_line


def _add_relayed(paths: Paths) -> None:
    text = "Relayed byte for byte to an attention server of the request's model; see SGLang's API"
    for path in RELAYED:
        method = "post" if path in RELAYED_POST else "get"
        paths.setdefault(path, {}).setdefault(method, _plain_operation(text, path))


def _portable(value: Any) -> Any:
    r"""Patterns in Python's dialect end with \Z; JSON Schema's have $ for that."""
    if isinstance(value, Mapping):
        return {
            key: item.replace("\\Z", "$") if key == "pattern" else _portable(item)
            for key, item in value.items()
        }
    return [_portable(item) for item in value] if isinstance(value, list) else value
