"""What relay processes and smg both do, in front of scripted servers; and what smg does alone."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from aiohttp import web
from process_trees import descendants
from router_harness import DEADLINE_S, FakeAttn, Received, RouterProcess, wait_until

pytestmark = pytest.mark.multiproc

needs_smg = pytest.mark.skipif(
    find_spec("smg") is None, reason="smg is not installed; pip install 'smg>=1.13,<2'"
)
PATH = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
Open = Callable[..., RouterProcess]


def chat(model: str = "m", **more: object) -> bytes:
    messages = [{"role": "user", "content": "a"}]
    return json.dumps({"model": model, "messages": messages, **more}).encode()


# What relay processes do is shown by other tests, too.
@pytest.fixture(
    params=[pytest.param("relay", marks=pytest.mark.slow), pytest.param("smg", marks=needs_smg)]
)
def open_router(request: pytest.FixtureRequest) -> Open:
    """Makes a router on either data plane."""

    def make(*urls: str, flags: tuple[str, ...] = ()) -> RouterProcess:
        if request.param == "relay":
            flags = (*flags, "--hold-timeout", "0.2")  # smg holds nothing
        return RouterProcess(*urls, flags=flags, data_plane=request.param)

    return make


async def answer_in_json(fake: FakeAttn, _request: web.Request) -> web.StreamResponse:
    return web.json_response({"answer_of": fake.port})


async def two_events(fake: FakeAttn, request: web.Request) -> web.StreamResponse:
    """One event at once, the other after the gate."""
    if request.method != "POST":
        return web.Response()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    await response.write(b'data: {"choices":[]}\n\n')
    await fake.gate.wait()
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture
def attn() -> Iterator[FakeAttn]:
    with FakeAttn(answer=answer_in_json) as fake:
        yield fake


@pytest.fixture
def other() -> Iterator[FakeAttn]:
    with FakeAttn(answer=answer_in_json) as fake:
        yield fake


def wait_for(router: RouterProcess, *fakes: FakeAttn) -> None:
    """Return once requests go to these servers, and to no others."""
    for fake in fakes:
        router.wait_for_state(fake, "serving")
    if router.data_plane == "smg":
        wait_until("smg knows the servers", lambda: _num_known(router) == len(fakes))


def _num_known(router: RouterProcess) -> int:
    told = json.loads(router.ask("GET", "/readiness").body)
    return int(told.get("healthy_workers", 0))


def asked(fake: FakeAttn) -> list[Received]:
    """The clients' requests; smg asks for something, too."""
    return [got for got in fake.received if got.method == "POST"]


def ask(router: RouterProcess, model: str = "m") -> int:
    """The port of the server that answered, or the status of the refusal."""
    reply = router.ask("POST", PATH, chat(model), JSON)
    return int(json.loads(reply.body)["answer_of"]) if reply.status == 200 else reply.status


@contextmanager
def serving_stream(router: RouterProcess, fake: FakeAttn) -> Iterator[http.client.HTTPResponse]:
    """A stream whose first event has come; the client leaves with the block."""
    wait_for(router, fake)
    connection = router.connect()
    connection.request("POST", PATH, chat(stream=True), JSON)
    with closing(connection), connection.getresponse() as response:
        assert response.read1() == b'data: {"choices":[]}\n\n'
        yield response


def test_fields_that_nobody_knows_reach_the_server_and_its_answer_the_client(
    open_router: Open, attn: FakeAttn
) -> None:
    odd = b'{ "answer" : 1.0,\n"odd":"\xc3\xa9 \\u00e9" }'

    async def answer(_fake: FakeAttn, _request: web.Request) -> web.Response:
        return web.Response(body=odd, content_type="application/json", headers={"X-Kept": "yes"})

    attn.answer = answer
    with open_router(attn.url) as router:
        wait_for(router, attn)

        reply = router.ask("POST", PATH, chat(afd_hint=[1, {"a": 2.5}], rid="r"), JSON)

    (got,) = asked(attn)
    body = json.loads(got.body)
    assert (body["afd_hint"], body["rid"], body["model"]) == ([1, {"a": 2.5}], "r", "m")
    assert (reply.status, reply.body, reply.headers["X-Kept"]) == (200, odd, "yes")


def test_a_drained_server_finishes_its_stream_and_gets_nothing_new(
    open_router: Open, attn: FakeAttn, other: FakeAttn
) -> None:
    attn.answer = two_events
    with open_router(attn.url) as router, serving_stream(router, attn) as stream:
        router.ask_itself("POST", "/workers", json.dumps({"url": other.url}).encode())
        wait_for(router, attn, other)

        router.ask_itself("POST", f"/afd/v1/servers/attn-{attn.port}/drain", b"{}")
        router.wait_for_state(attn, "draining")
        if router.data_plane == "smg":
            wait_until("smg lets go of it", lambda: _num_known(router) == 1)
        answers = {ask(router) for _ in range(6)}
        in_flight = router.servers()[attn.url]["num_in_flight"]
        attn.open_gate()
        rest = stream.read()

    assert answers == {other.port}
    assert in_flight == 1
    assert rest == b"data: [DONE]\n\n"
    assert len(asked(attn)) == 1


@pytest.mark.slow
def test_a_client_that_leaves_cancels_its_request_at_the_server(
    open_router: Open, attn: FakeAttn
) -> None:
    attn.answer = two_events
    with open_router(attn.url) as router:
        with serving_stream(router, attn):
            wait_until("it counts", lambda: router.servers()[attn.url]["num_in_flight"] == 1)

        wait_until("the server sees the client leave", lambda: attn.num_cancelled == 1)
        wait_until("nothing is there", lambda: router.servers()[attn.url]["num_in_flight"] == 0)


def test_the_death_of_a_server_fails_no_request_and_is_learned_from_them(
    open_router: Open, attn: FakeAttn, other: FakeAttn
) -> None:
    # Polls are too rare to tell of it.
    with open_router(attn.url, other.url, flags=("--status-interval-s", "60")) as router:
        wait_for(router, attn, other)
        attn.stop()

        answers = [ask(router) for _ in range(8)]

        assert answers == [other.port] * 8
        router.wait_for_state(attn, "degraded", "connection refused")
        assert router.servers()[other.url]["state"] == "serving"


@pytest.mark.slow
def test_servers_come_and_go_while_the_router_runs(open_router: Open, attn: FakeAttn) -> None:
    with FakeAttn(status={"role": "mlp", "state": "ready"}) as mlp, open_router() as router:
        before = ask(router)
        for url, kind in ((attn.url, "regular"), (mlp.url, "mlp")):
            body = json.dumps({"url": url, "worker_type": kind}).encode()
            router.ask_itself("POST", "/workers", body)
        wait_for(router, attn)
        between = ask(router)
        router.ask_itself("DELETE", f"/workers/attn-{attn.port}")
        wait_until("it gets nothing more", lambda: ask(router) in (404, 503))

    assert before in (404, 503)
    assert between == attn.port
    assert asked(mlp) == []


def test_a_request_goes_to_a_server_of_its_model_and_an_unknown_model_is_a_404(
    open_router: Open, attn: FakeAttn
) -> None:
    with (
        FakeAttn(answer=answer_in_json, models=("n",), fingerprint="cd") as other,
        open_router(attn.url, other.url, flags=("--lease-s", "3")) as router,
    ):
        wait_for(router, attn, other)

        answers = [ask(router, model) for model in ("m", "n", "m", "n")]
        # In the first lease a server of that name may still register again.
        wait_until("nobody has the model", lambda: ask(router, "o") == 404)

    assert answers == [attn.port, other.port, attn.port, other.port]
    assert {json.loads(got.body)["model"] for got in asked(attn)} == {"m"}


def test_only_who_knows_the_key_is_served(
    open_router: Open, attn: FakeAttn, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_text("s3cret")
    path.chmod(0o600)
    with open_router(attn.url, flags=("--api-key-file", str(path))) as router:
        wait_for(router, attn)

        replies = [
            router.ask("POST", PATH, chat(), {**JSON, **more})
            for more in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Bearer s3cret"})
        ]
        shown = _command_lines(router)

    assert [reply.status for reply in replies] == [401, 401, 200]
    assert ("Authorization", "Bearer s3cret") in [
        (name.title(), value) for name, value in asked(attn)[0].headers
    ]
    assert "s3cret" not in shown + "".join(router.log)


def _command_lines(router: RouterProcess) -> str:
    pids = [router.process.pid, *descendants(router.process.pid)]
    return "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


@pytest.mark.slow
def test_sigterm_lets_a_running_stream_finish_and_leaves_no_process(
    open_router: Open, attn: FakeAttn
) -> None:
    attn.answer = two_events
    with (
        open_router(attn.url, flags=("--shutdown-timeout-s", "15")) as router,
        serving_stream(router, attn) as stream,
    ):
        children = descendants(router.process.pid)

        router.process.send_signal(signal.SIGTERM)
        wait_until("no client is accepted", lambda: not _accepts(router))
        attn.open_gate()
        rest = stream.read()
        code = router.process.wait(DEADLINE_S)

    assert rest == b"data: [DONE]\n\n"
    assert code == 0
    assert children and not any(Path(f"/proc/{pid}").exists() for pid in children)


def _accepts(router: RouterProcess) -> bool:
    try:
        router.ask("GET", "/health")
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_servers_register_and_people_look_at_the_routers_own_endpoints(
    open_router: Open, attn: FakeAttn
) -> None:
    with open_router() as router:
        lease = router.ask_itself("POST", "/afd/v1/servers", attn.registration())
        wait_for(router, attn)
        answer = ask(router)
        wait_until("it is counted", lambda: router.servers()[attn.url]["num_served"] == 1)
        page = router.ask_itself("GET", "/")
        metrics = router.ask_itself("GET", "/metrics").body.decode()
        command = [sys.executable, "-m", "sgl_router_afd.status", router.own_url]
        table = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    assert (lease.status, answer, page.status) == (200, attn.port, 200)
    assert f'sgl_router_afd_server_served_requests_total{{server="{attn.url}"}} 1' in metrics
    assert table.returncode == 0
    assert f"data plane {router.data_plane}" in table.stdout and f"attn-{attn.port}" in table.stdout


@needs_smg
def test_smg_that_is_killed_is_started_again_and_serves_on(attn: FakeAttn) -> None:
    with RouterProcess(attn.url, data_plane="smg") as router:
        wait_for(router, attn)
        (smg,) = descendants(router.process.pid)

        os.kill(smg, signal.SIGKILL)
        wait_until("it is gone", lambda: not _accepts(router) or _smg_of(router) != smg)
        wait_until("another one serves", lambda: _served_by(router) == attn.port)

        line = "smg ended with exit code -9"
        wait_until("the log tells it", lambda: line in "".join(router.log))
        assert router.servers()[attn.url]["state"] == "serving"


@needs_smg
@pytest.mark.slow
def test_smg_that_hangs_is_killed_and_another_one_serves(attn: FakeAttn) -> None:
    flags = ("--relay-timeout-s", "5")
    with RouterProcess(attn.url, flags=flags, data_plane="smg") as router:
        wait_for(router, attn)
        (hung,) = descendants(router.process.pid)

        os.kill(hung, signal.SIGSTOP)
        wait_until(
            "another one serves",
            lambda: _smg_of(router) != hung and _served_by(router) == attn.port,
        )

        assert not Path(f"/proc/{hung}").exists()
        line = "smg was silent for 5 s and was killed; its requests are lost"
        wait_until("the log tells it", lambda: line in "".join(router.log))


def _smg_of(router: RouterProcess) -> int:
    return next(iter(descendants(router.process.pid)), 0)


def _served_by(router: RouterProcess) -> int:
    with suppress(OSError):
        return ask(router)
    return 0


@needs_smg
@pytest.mark.slow
def test_smg_ends_with_a_router_that_is_killed(attn: FakeAttn) -> None:
    with RouterProcess(attn.url, data_plane="smg") as router:
        smg = _smg_of(router)

        router.process.kill()

        wait_until("smg is gone", lambda: not Path(f"/proc/{smg}").exists())


@needs_smg
@pytest.mark.slow
def test_nobody_adds_a_server_past_the_control_plane(attn: FakeAttn, other: FakeAttn) -> None:
    with RouterProcess(attn.url, data_plane="smg") as router:
        wait_for(router, attn)

        refused = router.ask("POST", "/workers", json.dumps({"url": other.url}).encode(), JSON)
        shown = router.ask("GET", "/workers")
        own = router.ask_itself("GET", "/workers")

    assert (refused.status, shown.status, own.status) == (401, 401, 200)
    assert other.received == []


@needs_smg
@pytest.mark.slow
def test_smgs_own_metrics_are_among_the_routers(attn: FakeAttn) -> None:
    with RouterProcess(attn.url, data_plane="smg") as router:
        wait_for(router, attn)
        name = f'smg_worker_health{{worker="{attn.url}"}} 1'

        wait_until("smg tells of the server", lambda: name in _metrics(router))

        assert "sgl_router_afd_group_state" in _metrics(router)
        assert "sgl_router_afd_open_connections" not in _metrics(router)  # nobody counts them


def _metrics(router: RouterProcess) -> str:
    return router.ask_itself("GET", "/metrics").body.decode()


@needs_smg
@pytest.mark.slow
def test_a_port_that_is_held_and_a_flag_that_smg_does_not_know_end_the_start() -> None:
    with RouterProcess(data_plane="smg") as one:
        code, held = _failed_start("--port", str(one.port))
        own_code, held_own = _failed_start("--port", "0", "--control-port", str(one.own_port))
        late_code, unknown = _failed_start("--port", "0", "--smg-args=--no-such-flag 1")

    assert (code, own_code, late_code) == (2, 2, 1)
    assert f"cannot listen on 127.0.0.1:{one.port}" in held
    assert f"cannot listen on 127.0.0.1:{one.own_port}" in held_own and "--control-port" in held_own
    assert "no-such-flag" in unknown and "smg ended with exit code 2 before it listened" in unknown


def _failed_start(*flags: str) -> tuple[int, str]:
    """The exit code, and what was logged."""
    command = [sys.executable, "-m", "sgl_router_afd.launch_router", "--data-plane", "smg", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stderr


@needs_smg
@pytest.mark.slow
def test_a_flag_of_smg_reaches_it(attn: FakeAttn) -> None:
    with RouterProcess(
        attn.url, flags=("--smg-args=--model-alias n=m",), data_plane="smg"
    ) as router:
        wait_for(router, attn)

        assert ask(router, "n") == attn.port
