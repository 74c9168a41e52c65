from __future__ import annotations

import logging

import pytest
from router_api import ServedApi, serving
from router_servers import attn, mlp

CHANGES = [
    ("POST", "/workers"),
    ("DELETE", "/workers/attn-0"),
    ("DELETE", "/afd/v1/servers/attn-0"),
    ("POST", "/afd/v1/servers/attn-0/drain"),
    ("DELETE", "/afd/v1/servers/attn-0/drain"),
    ("POST", "/afd/v1/groups/group-1/drain"),
    ("DELETE", "/afd/v1/groups/group-1/drain"),
]
READS = [
    ("GET", "/afd/v1/groups"),
    ("HEAD", "/afd/v1/groups"),
    ("GET", "/afd/v1/servers"),
    ("GET", "/afd/v1/servers/attn-0"),
    ("GET", "/afd/v1/route?model=tiny"),
    ("POST", "/afd/v1/route?model=tiny"),
    ("GET", "/workers"),
    ("GET", "/workers/attn-0"),
]
OPEN = [("GET", "/health"), ("GET", "/readiness"), ("GET", "/openapi.json")]
BODIES = {"/workers": {"url": "http://new:30000"}}


def joined(api: ServedApi) -> None:
    expert = mlp("mlp-0")
    api.join(expert, attn("attn-0").attach(expert))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_changes_need_the_admin_key_where_there_is_one(method: str, path: str) -> None:
    body = BODIES.get(path) if method == "POST" else None
    with serving(admin_api_key="root-key", api_key="sk-1") as api:
        joined(api)
        before = api.ask("GET", "/afd/v1/servers", headers=bearer("root-key")).json
        without = api.ask(method, path, body)
        wrong = api.ask(method, path, body, headers=bearer("sk-1"))
        unchanged = api.ask("GET", "/afd/v1/servers", headers=bearer("root-key")).json == before
        right = api.ask(method, path, body, headers=bearer("root-key"))

    assert (without.status, wrong.status, unchanged) == (401, 401, True)
    assert without.headers["WWW-Authenticate"] == "Bearer"
    assert right.status in (200, 202)


@pytest.mark.parametrize(("method", "path"), READS)
def test_reading_needs_the_admin_key_where_there_is_one(method: str, path: str) -> None:
    with serving(admin_api_key="root-key") as api:
        joined(api)
        without = api.ask(method, path)
        right = api.ask(method, path, headers=bearer("root-key"))

    assert (without.status, right.status) == (401, 200)


@pytest.mark.parametrize(("method", "path"), OPEN)
def test_probes_and_the_document_stay_open(method: str, path: str) -> None:
    with serving(admin_api_key="root-key", api_key="sk-1") as api:
        joined(api)
        reply = api.ask(method, path)

    assert reply.status == 200


def test_the_list_of_models_needs_the_client_key_and_not_the_admin_key() -> None:
    with serving(admin_api_key="root-key", api_key="sk-1") as api:
        without = api.ask("GET", "/v1/models")
        admin = api.ask("GET", "/v1/models", headers=bearer("root-key"))
        client = api.ask("GET", "/v1/models", headers=bearer("sk-1"))

        head = api.ask("HEAD", "/v1/models")

    assert (without.status, admin.status, client.status, head.status) == (401, 401, 200, 401)


def test_other_paths_below_afd_v1_are_guarded_too() -> None:
    with serving(admin_api_key="root-key") as api:
        replies = [api.ask("GET", path) for path in ("/afd/v1/status", "/workers/a/b", "/nothing")]

    assert [reply.status for reply in replies] == [401, 401, 404]


def test_servers_register_with_their_secret_and_not_with_the_admin_key() -> None:
    with serving(admin_api_key="root-key") as api:
        reply = api.send(mlp("mlp-0").registration)

    assert reply.status == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic root-key",
        "root-key",
        "Bearer root-ke",
        "Bearer root-keyy",
        "Bearer r\u00f6\u00f6t-key",
    ],
)
def test_nearly_right_keys_are_wrong(value: str) -> None:
    with serving(admin_api_key="root-key") as api:
        reply = api.ask("GET", "/afd/v1/groups", headers={"Authorization": value})

    assert reply.status == 401


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
def test_the_scheme_is_read_as_http_says(scheme: str) -> None:
    with serving(admin_api_key="root-key") as api:
        reply = api.ask("GET", "/afd/v1/groups", headers={"Authorization": f"{scheme} root-key"})

    assert reply.status == 200


def test_keys_are_in_no_log_and_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(admin_api_key="root-key", api_key="sk-1", secret="s" * 16) as api:
        replies = [
            api.ask("GET", "/afd/v1/groups", headers=bearer("given-key")),
            api.ask("GET", "/v1/models", headers=bearer("given-key")),
            api.ask("POST", "/afd/v1/servers", b"{}"),
            api.ask("GET", "/openapi.json"),
        ]

    text = caplog.text + "".join(reply.body.decode() + str(reply.headers) for reply in replies)
    assert not [key for key in ("root-key", "sk-1", "given-key", "ssss") if key in text]


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_without_an_admin_key_nobody_changes_a_router_that_others_can_reach(
    method: str, path: str
) -> None:
    with serving(host="0.0.0.0") as api:
        joined(api)
        reply = api.ask(method, path, BODIES.get(path) if method == "POST" else None)
        readable = api.ask("GET", "/afd/v1/groups")

    assert (reply.status, readable.status) == (403, 200)
    assert "--admin-api-key-file" in reply.error and "0.0.0.0" in reply.error


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_without_an_admin_key_a_router_on_loopback_takes_changes(host: str) -> None:
    with serving(host=host) as api:
        joined(api)
        reply = api.ask("POST", "/afd/v1/servers/attn-0/drain")

    assert reply.status == 200


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:30000", "http://127.0.0.1:30000", 200),
        ("localhost:30000", "http://localhost:30000", 200),
        ("127.0.0.1:30000", "http://elsewhere.example", 403),
        ("127.0.0.1:30000", "http://127.0.0.1:8080", 403),
        ("elsewhere.example", "http://elsewhere.example", 403),
        ("127.0.0.1:30000", "null", 403),
        ("127.0.0.1:30000", "http://[", 403),
        ("[::1]:30000", "http://[::1]:30000", 200),
    ],
)
def test_a_page_of_another_site_changes_nothing(host: str, origin: str, status: int) -> None:
    with serving() as api:
        joined(api)
        headers = {"Host": host, "Origin": origin}
        reply = api.ask("POST", "/afd/v1/servers/attn-0/drain", headers=headers)

    assert reply.status == status
