"""Routers as processes: addresses, several on a host, the end, and a relay that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from process_trees import children_with
from raw_http import Client, Message, ask, post
from raw_server import DONE, SSE_HEAD, RawServer, Talk, event, wait_until
from router_harness import DEADLINE_S, RouterProcess

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.counters import SharedCounters
from sgl_router_afd.dataplane.handle import RelayHandle
from sgl_router_afd.dataplane.listen import open_listeners
from sgl_router_afd.dataplane.messages import setup_of

pytestmark = pytest.mark.multiproc

NUM_STREAMS = 24
RELAY = "sgl_router_afd.dataplane.process"


async def one_event_then_the_rest(talk: Talk) -> None:
    await talk.send(SSE_HEAD + event("1"))
    await talk.server.gate.wait()
    await talk.send(event("2") + DONE)


def _wait_until_ready(router: RouterProcess, server: RawServer) -> None:
    wait_until("ready", lambda: router.servers()[server.url]["state"] == "serving")


def _streams(stack: ExitStack, router: RouterProcess, server: RawServer) -> list[Client]:
    """Clients that have got their first event."""
    server.scripts[b"rest"] = one_event_then_the_rest
    server.close_gate()
    clients = [stack.enter_context(Client(router.address)) for _ in range(NUM_STREAMS)]
    for client in clients:
        client.send(post("/generate?answer=rest"))
    for client in clients:
        while b"data: 1" not in client.data:
            client.more()
    return clients


def _reply(client: Client) -> Message | None:
    try:
        return client.reply()
    except ConnectionError:
        return None


def test_routers_and_servers_on_an_ipv6_address_work() -> None:
    with RawServer(host="::1") as server:
        with RouterProcess(server.url, flags=("--host", "::1")) as router:
            _wait_until_ready(router, server)

            reply = ask(router.address, post("/generate?case=six"))

        assert reply.status == 200
        (heard,) = server.of_case("six")
        assert heard.values("host")[0] in (b"router", b"[::1]:%d" % server.port)


def test_two_routers_share_a_host_and_a_server_but_never_a_port(raw_server: RawServer) -> None:
    with RouterProcess(raw_server.url) as one, RouterProcess(raw_server.url) as two:
        for router in (one, two):
            _wait_until_ready(router, raw_server)
        command = [sys.executable, "-m", "sgl_router_afd.launch_router", "--attn", raw_server.url]

        third = subprocess.run(
            [*command, "--port", str(one.port)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

        assert [ask(router.address, post()).status for router in (one, two)] == [200, 200]
    assert third.returncode == 2
    assert f"cannot listen on 127.0.0.1:{one.port}" in third.stderr


def test_a_router_removes_what_a_killed_one_left_and_nothing_of_one_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with RouterProcess():
        (living,) = os.listdir(tmp_path)
        with RouterProcess() as killed:
            (left,) = {*os.listdir(tmp_path)} - {living}
            killed.process.kill()
            killed.process.wait()

        with RouterProcess() as third:
            found = os.listdir(tmp_path)

            assert third.stop() == 0
        assert living in found and left not in found and len(found) == 2
        assert os.listdir(tmp_path) == [living]


def test_sigterm_under_load_ends_no_stream(raw_server: RawServer) -> None:
    flags = ("--shutdown-timeout-s", "3600")
    with RouterProcess(raw_server.url, flags=flags) as router, ExitStack() as stack:
        _wait_until_ready(router, raw_server)
        idle = stack.enter_context(Client(router.address))
        clients = _streams(stack, router, raw_server)

        router.process.send_signal(signal.SIGTERM)
        wait_until("the router waits", lambda: any("waiting up to" in line for line in router.log))
        with pytest.raises(ConnectionRefusedError):
            ask(router.address, post())
        raw_server.open_gate()

        replies = [client.reply() for client in clients]
        assert idle.until_closed() == b""
        assert all(reply.is_whole and reply.body.endswith(b"[DONE]\n\n") for reply in replies)
        assert router.process.wait(DEADLINE_S) == 0
        assert "Traceback" not in "".join(router.log), "".join(router.log)


def test_a_relay_process_that_hangs_is_replaced_and_what_waited_for_it_is_answered(
    raw_server: RawServer,
) -> None:
    flags = ("--relay-processes", "1", "--relay-timeout-s", "5")
    with RouterProcess(raw_server.url, flags=flags) as router, ExitStack() as stack:
        _wait_until_ready(router, raw_server)
        (stream, *_) = _streams(stack, router, raw_server)
        (hung,) = children_with(router.process.pid, RELAY)

        os.kill(hung, signal.SIGSTOP)
        reply = ask(router.address, post())
        cut = _reply(stream)

        assert reply.status == 200
        assert cut is None or not cut.is_whole
        assert hung not in children_with(router.process.pid, RELAY)
        line = "relay process 0 was silent for 5 s and was killed; its requests are lost"
        wait_until("the log tells it", lambda: line in _log(router))
        wait_until("an answer", lambda: ask(router.address, post()).status == 200)


def _log(router: RouterProcess) -> str:
    return "".join(router.log)


@pytest.mark.slow
def test_a_router_with_a_relay_process_that_hangs_ends_all_the_same(raw_server: RawServer) -> None:
    flags = ("--relay-processes", "2", "--shutdown-timeout-s", "0", "--relay-timeout-s", "3600")
    with RouterProcess(raw_server.url, flags=flags) as router:
        _wait_until_ready(router, raw_server)
        hung, _ = children_with(router.process.pid, RELAY)
        os.kill(hung, signal.SIGSTOP)

        code = router.stop()

        assert code == 0
        line = "1 relay processes do not end; killing them"
        wait_until("the log tells it", lambda: line in _log(router))
        assert not Path(f"/proc/{hung}").exists()


def test_a_relay_process_that_is_asked_to_drain_while_it_starts_ends(tmp_path: Path) -> None:
    config = RouterConfig(relay_processes=1, shutdown_timeout_s=60)

    async def start_and_drain() -> int:
        counters = SharedCounters.create(1)
        [listeners] = open_listeners("127.0.0.1", 0, 1)
        setup = setup_of(config, 0, str(tmp_path / "control"))
        handle = RelayHandle(setup, counters, listeners, lambda message: None)
        running = asyncio.create_task(handle.keep_running())
        await asyncio.sleep(0)  # it is being started
        num_running = await handle.start_draining(config.shutdown_timeout_s)
        await asyncio.wait_for(running, DEADLINE_S)
        return num_running

    before = children_with(os.getpid(), RELAY)  # of routers that other tests share

    num_running = asyncio.run(start_and_drain())

    assert num_running == 0
    assert set(children_with(os.getpid(), RELAY)) <= set(before)


def test_a_killed_relay_process_takes_only_its_own_streams_with_it(raw_server: RawServer) -> None:
    flags = ("--relay-processes", "2")
    with RouterProcess(raw_server.url, flags=flags) as router, ExitStack() as stack:
        _wait_until_ready(router, raw_server)
        clients = _streams(stack, router, raw_server)
        killed, kept = children_with(router.process.pid, RELAY)

        os.kill(killed, signal.SIGKILL)
        statuses = [ask(router.address, post()).status for _ in range(40)]
        raw_server.open_gate()
        replies = [_reply(client) for client in clients]

        wholes = [reply is not None and reply.is_whole for reply in replies]
        assert statuses == [200] * 40
        assert 0 < sum(wholes) < NUM_STREAMS
        assert all(
            b"[DONE]" in reply.body for reply in replies if reply is not None and reply.is_whole
        )
        wait_until("two run again", lambda: len(children_with(router.process.pid, RELAY)) == 2)
        assert kept in children_with(router.process.pid, RELAY)
        wait_until(
            "nothing in flight",
            lambda: router.servers()[raw_server.url]["num_in_flight"] == 0,
        )
