"""The router as a process, in front of real HTTP servers whose generation is scripted."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from aiohttp import web
from router_harness import DEADLINE_S, NO_NAMES, FakeAttn, RouterProcess, answer_ok, wait_until

pytestmark = pytest.mark.multiproc

ODD_BODY = '{ "prompt" :"h\\u00e9 é",\n\t"afd_hint":[1, 2.50e1,{}], "n":1.0 }  '.encode()


@pytest.fixture
def attn() -> Iterator[FakeAttn]:
    with FakeAttn() as fake:
        yield fake


@pytest.fixture
def other() -> Iterator[FakeAttn]:
    with FakeAttn() as fake:
        yield fake


@pytest.fixture
def router(attn: FakeAttn) -> Iterator[RouterProcess]:
    # One that ends does so by itself, and not since its patience does.
    with RouterProcess(attn.url, flags=("--shutdown-timeout-s", "3600")) as process:
        process.wait_for_state(attn, "serving")
        yield process


@pytest.fixture
def pair(attn: FakeAttn, other: FakeAttn) -> Iterator[RouterProcess]:
    with RouterProcess(attn.url, other.url) as process:
        process.wait_for_state(attn, "serving")
        process.wait_for_state(other, "serving")
        yield process


async def two_events(fake: FakeAttn, request: web.Request) -> web.StreamResponse:
    """One event at once, the other after the gate."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await fake.gate.wait()
    await response.write(b"data: [DONE]\n\n")
    return response


async def die_after_one_event(fake: FakeAttn, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\nda")
    await fake.gate.wait()
    assert request.transport is not None
    request.transport.abort()
    return response


async def die_inside_a_json_body(fake: FakeAttn, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    if "sized" in request.query_string:
        response.content_length = 100
    await response.prepare(request)
    await response.write(b'{"text": "one')
    await fake.gate.wait()
    assert request.transport is not None
    request.transport.abort()
    return response


async def hold(fake: FakeAttn, _request: web.Request) -> web.StreamResponse:
    await fake.gate.wait()
    return web.Response(text="late")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_request_reaches_the_server_byte_for_byte(
    router: RouterProcess, attn: FakeAttn, path: str
) -> None:
    headers = {
        "Content-Type": "application/json; odd=1",
        "Authorization": "Bearer abc",
        "X-Tenant": "t 1",
        "Connection": "keep-alive, x-hop",
        "X-Hop": "1",
        "TE": "trailers",
    }

    router.ask("POST", path + "?a=%2F&b=c+d", ODD_BODY, headers)

    (got,) = attn.received
    assert (got.method, got.target, got.body) == ("POST", path + "?a=%2F&b=c+d", ODD_BODY)
    sent = [(name.lower(), value) for name, value in got.headers if name != "X-Request-Id"]
    assert sorted(sent) == [
        ("accept-encoding", "identity"),
        ("authorization", "Bearer abc"),
        ("content-length", str(len(ODD_BODY))),
        ("content-type", "application/json; odd=1"),
        ("host", f"127.0.0.1:{attn.port}"),
        ("x-tenant", "t 1"),
    ]


def test_a_chunked_and_a_compressed_request_body_arrive_as_they_were_sent(
    router: RouterProcess, attn: FakeAttn
) -> None:
    packed = gzip.compress(b"x" * 3_000_000)[:-1] + b"\xff"
    connection = router.connect()
    parts = iter([packed[:1000], packed[1000:]])

    connection.request(
        "POST", "/generate", parts, {"Content-Encoding": "gzip"}, encode_chunked=True
    )
    connection.getresponse().read()
    connection.close()

    (got,) = attn.received
    assert got.body == packed
    assert ("Content-Encoding", "gzip") in got.headers


def test_a_request_body_of_several_megabytes_is_relayed(
    router: RouterProcess, attn: FakeAttn
) -> None:
    body = bytes(range(256)) * 20_000

    router.ask("POST", "/generate", body)

    assert attn.received[0].body == body


def test_a_response_reaches_the_client_byte_for_byte(router: RouterProcess, attn: FakeAttn) -> None:
    packed = gzip.compress(b"an answer")

    async def answer(_fake: FakeAttn, _request: web.Request) -> web.Response:
        headers = {
            "Content-Type": "application/x-odd; a=b",
            "Content-Encoding": "gzip",
            "Server": "sglang",
            "X-Kept": "yes",
            "Keep-Alive": "timeout=9",
        }
        return web.Response(status=429, reason="Slow Down", body=packed, headers=headers)

    attn.answer = answer

    reply = router.generate()

    assert (reply.status, reply.reason, reply.body) == (429, "Slow Down", packed)
    assert reply.headers["Content-Type"] == "application/x-odd; a=b"
    assert reply.headers["Content-Length"] == str(len(packed))
    assert reply.headers["Server"] == "sglang"
    assert reply.headers["X-Kept"] == "yes"
    assert "Keep-Alive" not in reply.headers


def test_an_event_reaches_the_client_before_the_next_one_exists(
    router: RouterProcess, attn: FakeAttn
) -> None:
    attn.answer = two_events
    connection = router.connect()
    connection.request("POST", "/generate", b"{}")
    response = connection.getresponse()

    first = response.read1()
    attn.open_gate()
    rest = response.read()
    connection.close()

    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert (first, rest) == (b"data: 1\n\n", b"data: [DONE]\n\n")


def test_a_client_that_leaves_a_stream_cancels_it_at_the_server(
    router: RouterProcess, attn: FakeAttn
) -> None:
    attn.answer = two_events
    connection = router.connect()
    connection.request("POST", "/generate", b"{}")
    response = connection.getresponse()
    response.read1()

    response.close()
    connection.close()

    wait_until("the server sees the client leave", lambda: attn.num_cancelled == 1)
    wait_until("nothing in flight", lambda: router.servers()[attn.url]["num_in_flight"] == 0)
    assert router.servers()[attn.url]["num_served"] == 0


def test_a_client_that_leaves_before_the_answer_cancels_the_request_at_the_server(
    router: RouterProcess, attn: FakeAttn
) -> None:
    attn.answer = hold
    connection = router.connect()
    connection.request("POST", "/generate", b"{}")
    wait_until("the request is at the server", lambda: len(attn.received) == 1)

    connection.close()

    wait_until("the server sees the client leave", lambda: attn.num_cancelled == 1)
    wait_until("nothing in flight", lambda: router.servers()[attn.url]["num_in_flight"] == 0)


def test_a_stream_whose_server_dies_ends_in_an_error_event_and_is_cut(
    router: RouterProcess, attn: FakeAttn
) -> None:
    attn.answer = die_after_one_event
    attn.open_gate()

    with pytest.raises(http.client.IncompleteRead) as broken:
        router.generate()

    body = broken.value.partial
    start, _, event = body.partition(b"\n\nda\n\ndata: ")
    error = json.loads(event)["error"]
    assert start == b"data: 1"
    assert (error["code"], error["type"]) == (502, "bad_gateway")
    assert attn.url in error["message"]
    assert b"[DONE]" not in body


@pytest.mark.parametrize("target", ["/generate?sized", "/generate?chunked"])
def test_a_json_answer_whose_server_dies_is_cut_and_not_ended(
    router: RouterProcess, attn: FakeAttn, target: str
) -> None:
    attn.answer = die_inside_a_json_body
    attn.open_gate()

    with pytest.raises(http.client.IncompleteRead):
        router.ask("POST", target, b"{}")


def test_a_request_that_every_server_dies_of_is_a_502_and_reaches_each_once(
    pair: RouterProcess, attn: FakeAttn, other: FakeAttn
) -> None:
    async def die(_fake: FakeAttn, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    attn.answer = other.answer = die

    reply = pair.generate()

    assert (reply.status, reply.error["code"]) == (502, 502)
    assert (len(attn.received), len(other.received)) == (1, 1)


def test_a_request_whose_server_dies_before_it_answers_is_answered_by_another(
    pair: RouterProcess, attn: FakeAttn, other: FakeAttn
) -> None:
    async def die_behind_a_head(fake: FakeAttn, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await fake.gate.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    attn.answer = die_behind_a_head
    attn.open_gate()

    replies = [pair.ask("POST", "/generate", ODD_BODY).body for _ in range(2)]

    assert replies == [f"answer of {other.port}".encode()] * 2
    assert {got.body for got in attn.received} == {ODD_BODY}
    assert [got.body for got in other.received] == [ODD_BODY] * 2


def test_a_request_goes_to_another_server_when_the_chosen_one_refuses_the_connection(
    attn: FakeAttn, other: FakeAttn
) -> None:
    flags = ("--status-interval-s", "60")  # the router learns of the death from the request
    with RouterProcess(attn.url, other.url, flags=flags) as router:
        router.wait_for_state(attn, "serving")
        router.wait_for_state(other, "serving")
        attn.stop()

        bodies = {router.generate().body for _ in range(4)}

        assert bodies == {f"answer of {other.port}".encode()}
        router.wait_for_state(attn, "degraded")


def test_no_server_at_all_is_a_503_that_names_each_with_its_reason(
    attn: FakeAttn, other: FakeAttn
) -> None:
    attn.status = {"role": "attn", "state": "starting", "reason": "loading weights"}
    other.stop()
    with RouterProcess(attn.url, other.url, flags=("--hold-timeout", "0.2")) as router:
        router.wait_for_state(attn, "waiting")
        row = router.wait_for_state(other, "unheard", "refused")

        reply = router.generate()
        models = router.ask("GET", "/v1/models")
        health = router.ask("GET", "/health")

    assert (reply.status, reply.error["code"]) == (503, 503)
    assert reply.error["type"] == "service_unavailable"
    told = f"attn-{attn.port} is waiting (attaches to its MLP servers: loading weights)"
    assert told in reply.error["message"]
    assert row["reason"] == "connection refused"
    assert int(reply.headers["Retry-After"]) > 0
    assert [card["id"] for card in json.loads(models.body)["data"]] == ["m"]
    assert health.status == 200
    assert json.loads(health.body) == {"status": "ok", "num_ready": 0, "num_servers": 2}


def test_a_server_that_starts_after_the_router_gets_traffic(attn: FakeAttn) -> None:
    attn.stop()
    with RouterProcess(attn.url) as router:
        router.wait_for_state(attn, "unheard")

        with FakeAttn(port=attn.port):
            router.wait_for_state(attn, "serving")

            assert router.generate().status == 200


def test_a_detached_server_gets_no_traffic_until_it_is_ready_again(
    pair: RouterProcess, attn: FakeAttn, other: FakeAttn
) -> None:
    attn.status = {"role": "attn", "state": "detached", "reason": "MLP rank 1 is gone"}
    row = pair.wait_for_state(attn, "degraded")

    for _ in range(4):
        pair.generate()

    assert row["reason"] == "detached: MLP rank 1 is gone"
    assert (len(attn.received), len(other.received)) == (0, 4)

    attn.status = {"role": "attn", "state": "ready"}
    pair.wait_for_state(attn, "serving")
    for _ in range(4):
        pair.generate()

    assert (len(attn.received), len(other.received)) == (2, 6)


def test_a_running_stream_outlives_the_detachment_of_its_server(
    router: RouterProcess, attn: FakeAttn
) -> None:
    attn.answer = two_events
    connection = router.connect()
    connection.request("POST", "/generate", b"{}")
    response = connection.getresponse()
    response.read1()

    attn.status = {"role": "attn", "state": "detached", "reason": "stalled"}
    router.wait_for_state(attn, "degraded")
    attn.open_gate()

    assert response.read() == b"data: [DONE]\n\n"
    connection.close()


def test_neither_an_mlp_server_nor_a_plain_one_gets_traffic(
    attn: FakeAttn, other: FakeAttn
) -> None:
    attn.status = {"role": "mlp", "state": "ready"}
    other.status_code = 404
    with RouterProcess(attn.url, other.url, flags=("--hold-timeout", "0.2")) as router:
        router.wait_for_state(attn, "unheard", "its role is mlp")
        router.wait_for_state(other, "unheard", "not an sglang-afd server")

        reply = router.generate()

    assert reply.status == 503
    assert f"{attn.url}: its role is mlp" in reply.error["message"]
    assert attn.received == other.received == []


def test_least_load_avoids_the_server_with_a_running_request(
    pair: RouterProcess, attn: FakeAttn, other: FakeAttn
) -> None:
    attn.answer = other.answer = hold
    held = threading.Thread(target=pair.generate)
    held.start()
    wait_until("a request is held", lambda: len(attn.received) + len(other.received) == 1)
    busy, idle = (attn, other) if attn.received else (other, attn)
    idle.answer = answer_ok

    for _ in range(3):
        pair.generate()
    busy.open_gate()
    held.join()

    assert (len(busy.received), len(idle.received)) == (1, 3)
    assert pair.servers()[idle.url]["num_served"] == 3


def test_round_robin_takes_turns_whatever_the_answers_are(attn: FakeAttn, other: FakeAttn) -> None:
    async def refuse(_fake: FakeAttn, _request: web.Request) -> web.Response:
        return web.Response(status=400)

    attn.answer = refuse
    with RouterProcess(attn.url, other.url, flags=("--policy", "round_robin")) as router:
        router.wait_for_state(attn, "serving")
        router.wait_for_state(other, "serving")

        statuses = [router.generate().status for _ in range(6)]

    assert statuses in ([400, 200] * 3, [200, 400] * 3)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_a_413_and_reaches_no_server(
    attn: FakeAttn, is_chunked: bool
) -> None:
    with RouterProcess(attn.url, flags=("--max-body-bytes", "1000")) as router:
        router.wait_for_state(attn, "serving")
        connection = router.connect()
        body = iter([b"x" * 1001]) if is_chunked else b"x" * 1001

        connection.request("POST", "/generate", body, encode_chunked=is_chunked)
        got = connection.getresponse()
        error = json.loads(got.read())["error"]
        connection.close()

        assert (got.status, error["code"]) == (413, 413)
        assert "1000 bytes" in error["message"]
        assert router.ask("POST", "/generate", b"x" * 1000).status == 200
    assert len(attn.received) == 1


def test_models_come_from_a_ready_server(router: RouterProcess, attn: FakeAttn) -> None:
    reply = router.ask("GET", "/v1/models")

    assert (reply.status, reply.body) == (200, f"answer of {attn.port}".encode())
    assert (attn.received[0].method, attn.received[0].target) == ("GET", "/v1/models")


def test_unknown_endpoints_and_methods_are_refused_in_json(
    router: RouterProcess, attn: FakeAttn
) -> None:
    unknown = router.ask("POST", "/flush_cache", b"")
    wrong = router.ask("GET", "/generate")

    assert (unknown.status, unknown.error["code"]) == (404, 404)
    assert "/v1/chat/completions" in unknown.error["message"]
    assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")
    assert attn.received == []


def test_the_openai_client_chats_and_streams(router: RouterProcess, attn: FakeAttn) -> None:
    def chunk(**choice: object) -> dict[str, object]:
        base = {"id": "c1", "created": 1, "model": "m"}
        return base | {"choices": [{"index": 0, "finish_reason": None} | choice]}

    async def chat(_fake: FakeAttn, request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            whole = chunk(message={"role": "assistant", "content": "hello"}, finish_reason="stop")
            return web.json_response(whole | {"object": "chat.completion"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text in ("hel", "lo"):
            event = chunk(delta={"content": text}) | {"object": "chat.completion.chunk"}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    attn.answer = chat
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        ask = client.chat.completions.create
        whole = ask(model="m", messages=[{"role": "user", "content": "hi"}])
        stream = ask(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        pieces = [event.choices[0].delta.content for event in stream]

        attn.answer = die_after_one_event_of_chat
        attn.open_gate()
        broken = ask(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        with pytest.raises(openai.APIError, match="inside its answer: send the request again"):
            list(broken)

    assert whole.choices[0].message.content == "hello"
    assert pieces == ["hel", "lo"]


async def die_after_one_event_of_chat(_fake: FakeAttn, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"id": "c1", "choices": []}\n\n')
    assert request.transport is not None
    request.transport.abort()
    return response


def test_sigterm_lets_a_running_stream_finish_and_leaves_no_process(
    router: RouterProcess, attn: FakeAttn
) -> None:
    attn.answer = two_events
    connection = router.connect()
    connection.request("POST", "/generate", b"{}")
    response = connection.getresponse()
    response.read1()

    router.process.terminate()
    wait_until("the router waits", lambda: any("waiting up to" in line for line in router.log))
    with pytest.raises(ConnectionRefusedError):
        router.generate()
    attn.open_gate()

    assert response.read() == b"data: [DONE]\n\n"
    connection.close()
    assert router.process.wait(DEADLINE_S) == 0


def test_sigterm_cuts_a_stream_that_outlasts_the_shutdown_timeout(attn: FakeAttn) -> None:
    attn.answer = two_events
    with RouterProcess(attn.url, flags=("--shutdown-timeout-s", "0.05")) as router:
        router.wait_for_state(attn, "serving")
        connection = router.connect()
        connection.request("POST", "/generate", b"{}")
        response = connection.getresponse()
        response.read1()

        exit_code = router.stop()

        with pytest.raises(http.client.IncompleteRead):
            response.read()
        connection.close()
    assert exit_code == 0
    wait_until("the server sees the client leave", lambda: attn.num_cancelled == 1)


def test_an_idle_router_ends_at_once_with_an_open_keep_alive_connection(
    router: RouterProcess,
) -> None:
    connection = router.connect()
    connection.request("GET", "/health")
    connection.getresponse().read()

    exit_code = router.stop()
    connection.close()

    assert exit_code == 0


@pytest.mark.parametrize(
    ("flags", "exit_code", "message"),
    [
        (["--attn", "localhost:3000"], 2, "wanted http://host:port"),
        (["--attn", "http://a:1", "--attn", "http://a:1/"], 2, "name http://a:1 twice"),
        (["--smg-args=--x"], 2, "--smg-args has no effect with --data-plane relay"),
        (["--attn", "http://a:1", "--policy", "best"], 2, "choose one of least_load, prefix"),
        (["--attn", "http://a:1", "--port", "{taken}"], 2, "choose an address of this host"),
        (["--attn", "http://a:1", "--host", "no.such.host.invalid"], 2, "cannot listen on no.such"),
    ],
)
def test_a_setting_that_cannot_work_ends_the_start_with_one_error(
    flags: list[str], exit_code: int, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "sgl_router_afd.launch_router"]
        command += [flag.format(taken=port) for flag in flags]

        ended = subprocess.run(
            command,
            env=os.environ | NO_NAMES,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    assert ended.returncode == exit_code
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_temporary_directory_with_too_long_a_name_ends_the_start_with_one_error(
    tmp_path: Path,
) -> None:
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    command = [sys.executable, "-m", "sgl_router_afd.launch_router", "--port", "0"]

    ended = subprocess.run(
        command,
        env=os.environ | {"TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert ended.returncode == 2
    assert "set TMPDIR to a short path" in ended.stderr and "Traceback" not in ended.stderr
    assert list(directory.iterdir()) == []
