from __future__ import annotations

from collections import Counter

import pytest
from router_api import ServedApi, serving
from router_servers import OTHER, TTL_S, FakeServer, attn, mlp

ROUTE = "/afd/v1/route"


def joined(api: ServedApi, num: int = 3) -> list[FakeServer]:
    expert = mlp("mlp-0")
    servers = [attn(f"attn-{index}").attach(expert) for index in range(num)]
    api.join(expert, *servers)
    return servers


def decided(api: ServedApi, times: int) -> Counter[str]:
    return Counter(api.ask("GET", f"{ROUTE}?model=tiny").json["server_id"] for _ in range(times))


def test_a_decision_names_the_server_its_address_its_group_and_the_epoch() -> None:
    with serving() as api:
        joined(api, 1)
        reply = api.ask("GET", f"{ROUTE}?model=tiny")

    assert reply.json == {
        "server_id": "attn-0",
        "url": "http://attn-0:30000",
        "group": "group-1",
        "epoch": 2,
    }


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_a_burst_of_decisions_between_two_reports_is_spread(policy: str) -> None:
    with serving(policy=policy) as api:
        joined(api)
        spread = decided(api, 12)

    assert spread == {"attn-0": 4, "attn-1": 4, "attn-2": 4}


def test_decisions_count_until_the_server_reports_again() -> None:
    with serving() as api:
        servers = joined(api, 2)
        before = decided(api, 4)
        servers[0].renew(api.plane, 1.0)  # its two requests are over; the other has not reported
        after = decided(api, 2)

    assert before == {"attn-0": 2, "attn-1": 2}
    assert after == {"attn-0": 2}


def test_a_server_with_more_requests_of_this_router_gets_fewer_decisions() -> None:
    with serving() as api:
        joined(api, 2)
        api.count("attn-0", in_flight=5)
        spread = decided(api, 5)

    assert spread == {"attn-1": 5}


def test_requests_with_the_same_beginning_go_to_the_same_server() -> None:
    with serving(policy="prefix") as api:
        joined(api)
        bodies = [
            {"model": "tiny", "messages": [{"role": "system", "content": str(kind) * 400}]}
            for kind in range(8)
        ]
        first, second = (
            [api.ask("POST", ROUTE, body).json["server_id"] for body in bodies] for _ in range(2)
        )

    assert first == second
    assert len(set(first)) > 1


def test_the_model_of_a_body_decides_and_the_query_goes_before_it() -> None:
    with serving() as api:
        joined(api, 1)
        api.join(
            other := mlp("mlp-x", fingerprint=OTHER),
            attn("attn-x", fingerprint=OTHER, models=("big",)).attach(other),
        )
        by_body = api.ask("POST", ROUTE, {"model": "big", "prompt": "hi"})
        by_query = api.ask("POST", f"{ROUTE}?model=tiny", {"model": "big", "prompt": "hi"})
        by_part = api.ask("POST", f"{ROUTE}?model=big", b'{"messages":[{"content":"cut o')

    assert by_body.json["server_id"] == "attn-x"
    assert by_query.json["server_id"] == "attn-0"
    assert by_part.json["server_id"] == "attn-x"


def test_a_request_without_a_model_is_400_where_there_are_several() -> None:
    with serving() as api:
        joined(api, 1)
        api.join(
            other := mlp("mlp-x", fingerprint=OTHER),
            attn("attn-x", fingerprint=OTHER, models=("big",)).attach(other),
        )
        reply = api.ask("GET", ROUTE)

    assert reply.status == 400
    assert "big, tiny" in reply.error


def test_an_unknown_model_is_404_and_the_answer_names_those_that_there_are() -> None:
    with serving() as api:
        joined(api, 1)
        api.now_s = TTL_S
        api.plane.update(TTL_S)
        reply = api.ask("GET", f"{ROUTE}?model=large")

    assert reply.status == 404
    assert "'large'" in reply.error and "tiny" in reply.error


def test_where_nobody_serves_the_answer_is_503_with_the_reason_and_when_to_come_back() -> None:
    with serving() as api:
        api.join(mlp("mlp-0"), attn("attn-0"))
        reply = api.ask("GET", f"{ROUTE}?model=tiny")

    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    assert "attaches to its MLP servers" in reply.error


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": 5}', b"[]"])
def test_a_body_without_a_readable_model_is_400(body: bytes) -> None:
    with serving() as api:
        joined(api, 1)
        reply = api.ask("POST", ROUTE, body)

    assert reply.status == 400
