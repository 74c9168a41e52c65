"""`python -m sgl_router_afd.status` as people and scripts run it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from loop_thread import LoopThread
from page_fleet import PageServer
from page_scenes import Ready, answer_of, empty

from sglang_afd.ports import hold_free_ports

COMMAND = [sys.executable, "-m", "sgl_router_afd.status"]


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as loop:
        yield loop


@pytest.fixture
def router(loop: LoopThread) -> Iterator[PageServer]:
    with PageServer(loop) as server:
        yield server


def status(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "http_proxy": "http://127.0.0.1:9", **environment},
    )


def test_a_ready_group_ends_with_0_and_a_table(router: PageServer) -> None:
    router.answer = Ready().step()

    done = status(router.url)

    assert (done.returncode, done.stderr) == (0, "")
    assert "group group-1  READY" in done.stdout
    assert "\x1b" not in done.stdout


def test_no_ready_group_ends_with_1(router: PageServer) -> None:
    router.answer = answer_of(empty())

    done = status(router.url, LC_ALL="C", PYTHONIOENCODING="ascii")

    assert (done.returncode, done.stderr) == (1, "")
    assert "No server has registered yet" in done.stdout


def test_json_is_what_the_router_said(router: PageServer) -> None:
    router.answer = Ready().step()

    done = status(router.url, "--json")

    assert json.loads(done.stdout) == json.loads(msgspec.json.encode(router.answer))
    assert done.stdout.count("\n") == 1


def test_a_port_where_nobody_listens_ends_with_2() -> None:
    with hold_free_ports("127.0.0.1", 1) as [port]:
        done = status(f"http://127.0.0.1:{port}")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"nobody listens at http://127.0.0.1:{port}; is the router started, and is that its "
        "--host and --port?\n"
    )


@pytest.mark.parametrize(
    ("status_code", "body", "words"),
    [
        (404, b"nothing here", "answers 404 for /afd/v1/groups: nothing here; is that an"),
        (200, b"<html>", "is not of an sglang-afd router"),
        (200, b'{"version": 1}', "is not of an sglang-afd router"),
        (200, b'{"version": 2}', "answers in version 2, this program reads 1; install the same"),
    ],
)
def test_what_is_no_router_ends_with_2(
    router: PageServer, status_code: int, body: bytes, words: str
) -> None:
    router.answer, router.status = body, status_code

    done = status(router.url)

    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_router_with_an_admin_key_says_which_flag_has_it(
    router: PageServer, tmp_path: Path
) -> None:
    router.answer, router.key = Ready().step(), "sesame-7"
    key = tmp_path / "key"
    key.write_text("sesame-7\n")
    key.chmod(0o600)

    without, with_key = status(router.url), status(router.url, "--admin-api-key-file", str(key))

    assert without.returncode == 2
    assert "--admin-api-key-file FILE" in without.stderr
    assert with_key.returncode == 0


def test_watching_goes_on_over_a_lost_router_and_ends_with_what_it_saw_last(
    router: PageServer,
) -> None:
    router.answer = Ready().step()
    watcher = subprocess.Popen(
        [*COMMAND, router.url, "--watch", "0.1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with watcher:
        assert watcher.stdout is not None and watcher.stderr is not None
        assert watcher.stdout.readline().startswith("{")

        router.stop()
        # A request that was under way may have broken off before.
        while "nobody listens" not in (line := watcher.stderr.readline()):
            assert line, "it ended"
        router.start()
        num_asked = router.num_asked
        while router.num_asked < num_asked + 2:
            assert watcher.stdout.readline().startswith("{")
        watcher.send_signal(signal.SIGINT)

        assert watcher.wait(timeout=30) == 0


def test_a_terminal_gets_colour_unless_it_says_no(router: PageServer) -> None:
    router.answer = Ready().step()
    seen = {}
    for no_colour in ({}, {"NO_COLOR": "1"}):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*COMMAND, router.url], stdout=theirs, env={**os.environ, "TERM": "xterm", **no_colour}
        )
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(ours, 65536):
                text += piece
        process.wait(timeout=30)
        os.close(ours)
        seen[bool(no_colour)] = b"\x1b[32mserving" in text

    assert seen == {False: True, True: False}
