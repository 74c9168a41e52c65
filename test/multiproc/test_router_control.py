"""The router's control plane as a process: pair probes, keys, the state file, servers it asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_registration import ONE_TOKEN
from router_harness import DEADLINE_S, FakeAttn, RouterProcess, wait_until

pytestmark = pytest.mark.multiproc


@pytest.fixture
def attn() -> Iterator[FakeAttn]:
    with FakeAttn() as fake:
        yield fake


async def hang_up(_fake: FakeAttn, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, b"away", "its pair probe got no token in time (HTTP 503: away)"),
        (500, b"oops", "its pair probe failed (HTTP 500: oops)"),
        (200, b"<html>", "its pair probe failed (no token in '<html>')"),
        (200, b'{"meta_info":{"completion_tokens":0}}', "its pair probe failed (no token in"),
    ],
)
def test_a_server_whose_probe_brings_no_token_gets_no_requests_until_one_does(
    attn: FakeAttn, status: int, body: bytes, reason: str
) -> None:
    attn.probe_answer = (status, body)
    with RouterProcess(attn.url, flags=("--hold-timeout", "0.1")) as router:
        router.wait_for_state(attn, "degraded", reason)
        refused = router.generate()

        attn.probe_answer = (200, ONE_TOKEN)
        router.wait_for_state(attn, "serving")
        served = router.generate()

    assert (refused.status, served.status) == (503, 200)
    assert reason in refused.error["message"]
    assert len(attn.received) == 1


def test_a_probe_that_is_declined_says_nothing_against_the_server(attn: FakeAttn) -> None:
    attn.probe_answer = (401, b"no key")
    with RouterProcess(attn.url) as router:
        row = router.wait_for_state(attn, "serving")

        assert "declined (HTTP 401: no key)" in row["reason"]


def test_a_probe_asks_for_one_token_with_the_routers_key(attn: FakeAttn, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("s3cret\n")
    path.chmod(0o600)
    with RouterProcess(attn.url, flags=("--api-key-file", str(path))) as router:
        router.wait_for_state(attn, "serving")

    (probe,) = attn.probes
    asked = json.loads(probe.body)
    assert (probe.method, probe.target) == ("POST", "/generate")
    assert asked["sampling_params"]["max_new_tokens"] == 1
    assert asked["sampling_params"]["temperature"] == 0
    assert ("Authorization", "Bearer s3cret") in probe.headers
    assert "s3cret" not in "".join(router.log)


def test_a_broken_answer_is_followed_by_one_probe_and_by_no_loss_of_requests(
    attn: FakeAttn,
) -> None:
    with RouterProcess(attn.url) as router:
        router.wait_for_state(attn, "serving")
        attn.answer = hang_up

        reply = router.generate()
        wait_until("a second probe", lambda: len(attn.probes) == 2)

        assert reply.status in (502, 503)
        assert router.servers()[attn.url]["state"] == "serving"


def test_a_server_that_stops_is_degraded_though_its_lease_runs_on(attn: FakeAttn) -> None:
    with RouterProcess(attn.url, flags=("--lease-s", "3600")) as router:
        router.wait_for_state(attn, "serving")

        attn.stop()

        router.wait_for_state(attn, "degraded", "connection refused")


def test_a_server_that_stops_is_gone_after_its_lease(attn: FakeAttn) -> None:
    with RouterProcess(attn.url, flags=("--lease-s", "1")) as router:
        wait_until("it registered", lambda: router.servers()[attn.url]["state"] != "unheard")

        attn.stop()

        router.wait_for_state(attn, "unheard", "connection refused")


@pytest.mark.parametrize("is_file_lost", [False, True])
def test_a_group_keeps_its_name_and_its_epoch_does_not_go_back_over_a_restart_of_the_router(
    attn: FakeAttn, tmp_path: Path, is_file_lost: bool
) -> None:
    path = tmp_path / "state.json"
    flags = ("--state-file", str(path), "--lease-s", "3600")  # nobody renews
    told: list[dict[str, Any]] = []
    for _ in range(3):
        with RouterProcess(flags=flags) as router:
            told.append(register(router, attn, told[-1] if told else {}))
            router.wait_for_state(attn, "serving")
            saved = json.loads(path.read_bytes())["groups"]
            assert saved == {told[-1]["group"]: told[-1]["epoch"]}
            attn.restart()
            told.append(register(router, attn, {}))
        if is_file_lost:
            path.unlink()

    assert [lease["group"] for lease in told] == ["group-1"] * 6
    # A router that was restarted counts on from there; a process that was restarted is a change.
    assert [lease["epoch"] for lease in told] == [1, 2, 2, 3, 3, 4]


def register(router: RouterProcess, attn: FakeAttn, told: dict[str, Any]) -> dict[str, Any]:
    """Register the server with what it was told last; returns the lease."""
    message = json.loads(attn.registration())
    message |= {name: told[name] for name in ("group", "epoch") if name in told}
    reply = router.ask("POST", "/afd/v1/servers", json.dumps(message).encode())
    assert reply.status == 200, reply.body
    lease: dict[str, Any] = json.loads(reply.body)
    return lease


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("{}x"), "is damaged or not ours"),
        (lambda path: None, "cannot be written: No such file or directory"),
        (os.mkfifo, "is a named pipe, wanted a file"),
    ],
)
def test_a_state_file_that_cannot_be_used_ends_the_start_with_one_error(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "state" if "No such" not in message else tmp_path / "no" / "such" / "state"
    make(path)
    command = [sys.executable, "-m", "sgl_router_afd.launch_router", "--port", "0"]

    ended = subprocess.run(
        [*command, "--state-file", str(path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert ended.returncode == 2
    assert message in ended.stderr and "Traceback" not in ended.stderr


def test_a_server_that_is_added_while_the_router_runs_gets_requests_and_leaves_when_removed(
    attn: FakeAttn,
) -> None:
    with RouterProcess() as router:
        added = router.ask("POST", "/workers", json.dumps({"url": attn.url}).encode())
        wait_until("the server is asked", lambda: attn.url in router.servers())
        router.wait_for_state(attn, "serving")
        served = router.generate()

        removed = router.ask("DELETE", f"/workers/attn-{attn.port}")
        wait_until("the server is forgotten", lambda: router.servers() == {})

    assert added.status in (200, 202)
    assert served.status == 200
    assert removed.status in (200, 202)


def test_a_router_without_any_server_has_an_empty_list_of_models() -> None:
    with RouterProcess() as router:
        reply = router.ask("GET", "/v1/models")

    assert (reply.status, json.loads(reply.body)) == (200, {"object": "list", "data": []})


def test_a_drained_server_gets_no_new_requests_until_that_is_taken_back(attn: FakeAttn) -> None:
    with FakeAttn() as other, RouterProcess(attn.url, other.url) as router:
        router.wait_for_state(attn, "serving")
        router.wait_for_state(other, "serving")

        router.ask("POST", f"/afd/v1/servers/attn-{attn.port}/drain", b'{"reason": "restart"}')
        row = router.wait_for_state(attn, "draining")
        for _ in range(4):
            router.generate()
        drained = len(attn.received)
        router.ask("DELETE", f"/afd/v1/servers/attn-{attn.port}/drain")
        router.wait_for_state(attn, "serving")
        for _ in range(4):
            router.generate()

    assert row["reason"] == "restart"
    assert (drained, len(attn.received)) == (0, 2)


def test_metrics_tell_of_groups_probes_and_servers(attn: FakeAttn) -> None:
    with RouterProcess(attn.url) as router:
        router.wait_for_state(attn, "serving")
        router.generate()

        text = router.ask("GET", "/metrics").body.decode()

    assert 'sgl_router_afd_group_state{group="group-1",state="ready"} 1' in text
    assert 'sgl_router_afd_pair_probes_total{outcome="passed"} 1' in text
    assert f'sgl_router_afd_server_served_requests_total{{server="{attn.url}"}} 1' in text
