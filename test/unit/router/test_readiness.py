from __future__ import annotations

import pytest

from sgl_router_afd.readiness import ServerState, judge


@pytest.mark.parametrize("state", ["starting", "ready", "stalled", "detached"])
def test_the_state_of_an_attention_server_is_taken_over(state: str) -> None:
    body = b'{"role": "attn", "state": "%b", "reason": "why", "newer_field": [1]}' % state.encode()

    verdict = judge(200, body)

    assert (verdict.state, verdict.reason) == (ServerState(state), "why")


@pytest.mark.parametrize(
    ("http_status", "body", "reason"),
    [
        (404, b"", "it has no /afd/v1/status; start it with python -m sglang_afd.launch_server"),
        (401, b"", "answered 401, wanted 200"),
        (200, b"", "something else than a status"),
        (200, b"<html>", "something else than a status"),
        (200, b'{"role": "\xff"}', "something else than a status"),
        (200, b"[]", "something else than a status"),
        (200, b'{"state": "ready"}', "role"),
        (200, b'{"role": "attn", "state": 1}', "state"),
        (200, b'{"role": "mlp", "state": "ready"}', "role is 'mlp' and only 'attn'"),
        (200, b'{"role": "router"}', "role is 'router'"),
        (200, b'{"role": "attn"}', "state ''"),
        (
            200,
            b'{"role": "attn", "state": "unreachable"}',
            "knows starting, ready, stalled, detached",
        ),
    ],
)
def test_any_other_answer_is_unsuitable_and_says_why(
    http_status: int, body: bytes, reason: str
) -> None:
    verdict = judge(http_status, body)

    assert verdict.state is ServerState.UNSUITABLE
    assert reason in verdict.reason
