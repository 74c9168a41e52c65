from __future__ import annotations

import pytest

from sgl_router_afd.dataplane.body import Said
from sgl_router_afd.dataplane.judge import (
    judge_body,
    judge_key,
    judge_path,
    no_model,
    unknown_model,
)
from sgl_router_afd.endpoints import OTHER_KINDS, OWN, RELAYED_GET, RELAYED_POST, Target, find
from sgl_router_afd.keys import NO_KEY, Key

KEY = Key(b"secret")


@pytest.mark.parametrize("path", RELAYED_POST)
def test_a_relayed_path_takes_post_alone(path: str) -> None:
    endpoint = find(path.encode())

    assert endpoint is not None and endpoint.target is Target.SERVER
    assert judge_path(path.encode(), b"POST", endpoint) is None
    refusal = judge_path(path.encode(), b"GET", endpoint)
    assert refusal is not None and (refusal.http_status, refusal.headers) == (
        405,
        (("Allow", "POST"),),
    )


@pytest.mark.parametrize("path", RELAYED_GET)
def test_what_is_asked_for_takes_get_and_head(path: str) -> None:
    endpoint = find(path.encode())

    assert endpoint is not None and endpoint.target in (Target.SERVER, Target.MODELS)
    assert judge_path(path.encode(), b"HEAD", endpoint) is None


@pytest.mark.parametrize("path", [*OWN, "/afd/v1/groups/g/drain", "/workers", "/workers/a%2Fb"])
@pytest.mark.parametrize("method", [b"GET", b"POST", b"DELETE", b"OPTIONS"])
def test_the_control_process_judges_the_methods_of_its_own_paths(path: str, method: bytes) -> None:
    endpoint = find(path.encode())

    assert endpoint is not None and endpoint.target is Target.CONTROL
    assert judge_path(path.encode(), method, endpoint) is None


@pytest.mark.parametrize(
    "path",
    [
        *("/afd/v1x", "/afd", "/afd/v2/groups", "/workersx", "/v1/modelsx", "/v1/models/"),
        *("/flush_cache", "//generate", "/generate/", "/v1/responses/", "/workers/"),
    ],
)
def test_a_path_beside_the_known_ones_is_nobodys(path: str) -> None:
    endpoint = find(path.encode())

    refusal = judge_path(path.encode(), b"POST", endpoint)

    assert refusal is not None and refusal.http_status in (404, 405)


def test_a_models_name_may_have_slashes() -> None:
    endpoint = find(b"/v1/models/org/model-a")

    assert endpoint is not None and endpoint.target is Target.MODEL


@pytest.mark.parametrize("path", OTHER_KINDS)
def test_endpoints_of_other_kinds_of_models_are_refused_with_the_reason(path: str) -> None:
    refusal = judge_path(path.encode(), b"POST", find(path.encode()))

    assert refusal is not None and refusal.http_status == 400
    assert refusal.code == "unsupported_endpoint"
    assert path in refusal.message and OTHER_KINDS[path] in refusal.message


def test_an_earlier_response_cannot_be_asked_for() -> None:
    path = b"/v1/responses/resp_1"

    refusal = judge_path(path, b"GET", find(path))

    assert refusal is not None and refusal.http_status == 404
    assert "kept by the server that made it" in refusal.message


@pytest.mark.parametrize(
    ("said", "param"),
    [
        (Said(), ""),
        (Said(background=False), ""),
        (Said(background=True), "background"),
        (Said(previous_response_id="resp_1"), "previous_response_id"),
        (Said(previous_response_id=""), "previous_response_id"),
    ],
)
def test_a_response_that_needs_one_server_is_refused(said: Said, param: str) -> None:
    refusal = judge_body(b"/v1/responses", said)

    assert (refusal.param if refusal else "") == param
    assert judge_body(b"/generate", said) is None


@pytest.mark.parametrize(
    "given", [b"", b"secret", b"Bearer", b"Bearer secre", b"Bearer secrets", b"Basic secret"]
)
def test_a_wrong_key_is_refused_and_not_told(given: bytes) -> None:
    refusal = judge_key(KEY, given)

    assert refusal is not None and refusal.http_status == 401
    assert "secre" not in refusal.message


@pytest.mark.parametrize("given", [b"Bearer secret", b"bearer  secret"])
def test_the_right_key_is_let_in(given: bytes) -> None:
    assert judge_key(KEY, given) is None


def test_without_a_key_everybody_is_let_in() -> None:
    assert judge_key(NO_KEY, b"") is None


def test_a_long_or_odd_name_of_a_model_is_shown_short_and_in_ascii() -> None:
    refusal = unknown_model("\ud800\n" + "x" * 10_000, ["b", "a"])

    assert len(refusal.message) < 300 and "there is a, b" in refusal.message
    assert refusal.message.encode("ascii")


def test_who_looked_at_a_part_says_how_much() -> None:
    assert "first 70 bytes" in no_model("it names no model", 70).message
    assert no_model("it names no model", 0).message == "it names no model"
