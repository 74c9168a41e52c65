"""The page of a whole router, through its relay, with a scripted attention server behind it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from router_harness import FakeAttn, RouterProcess

if TYPE_CHECKING:
    from conftest import Page

KEY = "sesame-7"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "admin-key"
    path.touch(mode=0o600)
    path.write_text(KEY)
    return path


@pytest.fixture
def router(key_file: Path) -> Iterator[tuple[RouterProcess, FakeAttn]]:
    flags = ("--relay-processes", "1", "--admin-api-key-file", str(key_file))
    with FakeAttn() as fake, RouterProcess(fake.url, flags=flags) as router:
        yield router, fake


def test_a_whole_router_shows_its_servers_to_who_has_the_key(
    page: Page, router: tuple[RouterProcess, FakeAttn]
) -> None:
    page.open_at(f"{router[0].url}/")
    page.until("!document.getElementById('key').hidden")

    page.type(KEY)
    page.press("Enter")

    page.until("document.querySelector('.group')?.dataset.state === 'ready'")
    assert page.texts(".server[data-standing=serving] .brief") != []
    assert page.count(".picture .wires .attached") == 1
    assert "it never registered" in page.text(".server.ghost .why")
    page.picture("router-1280-light")
    router[1].stop()
    page.until("document.querySelector('.group').dataset.state !== 'ready'")
    router[0].stop()
    page.until("document.body.dataset.link === 'lost'")


def test_the_page_says_how_it_may_be_kept_and_what_may_run(
    router: tuple[RouterProcess, FakeAttn],
) -> None:
    first = router[0].ask("GET", "/")
    again = router[0].ask("GET", "/", headers={"If-None-Match": first.headers["ETag"]})
    head = router[0].ask("HEAD", "/")

    assert (first.status, again.status, head.status) == (200, 304, 200)
    assert (again.body, head.body) == (b"", b"")
    assert first.headers["Content-Type"] == "text/html; charset=utf-8"
    for answer in (first, again, head):
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Cache-Control"] == "no-cache"


def test_the_terminal_shows_the_same(
    router: tuple[RouterProcess, FakeAttn], key_file: Path
) -> None:
    command = [sys.executable, "-m", "sgl_router_afd.status", router[0].url]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    command += ["--admin-api-key-file", str(key_file)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    while done.returncode == 1:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (refused.returncode, refused.stdout) == (2, "")
    assert done.returncode == 0, done.stderr
    assert "READY  serves m" in done.stdout
    assert KEY not in refused.stderr + done.stdout + done.stderr + "".join(router[0].log)
