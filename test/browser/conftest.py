"""One Chromium for all tests, and a tab and a server of the page for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Tab, find_browser, running
from loop_thread import LoopThread
from page_fleet import PageServer

PICTURES = Path(__file__).parents[2] / "build" / "pictures"


class Page:
    """A tab that plain tests can use; see `browser.Tab`."""

    def __init__(self, tab: Tab, loop: LoopThread, server: PageServer) -> None:
        self._tab = tab
        self._loop = loop
        self.server = server

    @property
    def problems(self) -> list[str]:
        return self._tab.problems

    def look(self, *, width: int = 1280, scheme: str = "light") -> None:
        self._loop.call(self._tab.look(width=width, scheme=scheme))

    def open(self) -> None:
        """Open the server's page and wait until it shows something."""
        self.open_at(self.server.url)

    def open_at(self, url: str) -> None:
        """The same of the page of a router."""
        self._loop.call(self._tab.open(url))
        self.until("document.body.dataset.link")

    def ask(self, expression: str) -> Any:
        return self._loop.call(self._tab.ask(expression))

    def until(self, expression: str) -> None:
        self._loop.call(self._tab.until(expression))

    def press(self, *keys: str) -> None:
        for key in keys:
            self._loop.call(self._tab.press(key))

    def type(self, text: str) -> None:
        self._loop.call(self._tab.type(text))

    def picture(self, name: str) -> None:
        """Keep a screenshot for people to look at."""
        self._loop.call(self._tab.picture(PICTURES / f"{name}.png"))

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.ask(f"document.querySelector({selector!r}).innerText"))

    def texts(self, selector: str) -> list[str]:
        """The same of each that there is."""
        found = self.ask(
            f"[...document.querySelectorAll({selector!r})].map((one) => one.innerText)"
        )
        return list(found)

    def count(self, selector: str) -> int:
        return int(self.ask(f"document.querySelectorAll({selector!r}).length"))

    def until_asked_again(self) -> None:
        """Wait until an answer that was set before this call has been drawn."""
        num_asked = self.server.num_asked
        while self.server.num_asked < num_asked + 2:
            # The page asks at once when somebody comes back to its tab.
            self.ask("document.dispatchEvent(new Event('visibilitychange'))")
            self.rest(0.05)
        self.rest(0.1)

    def until_told_of_a_problem(self) -> None:
        """Wait for what the browser says of the page by itself."""
        while not self.problems:  # else the test's own limit ends it
            self.rest(0.05)

    def rest(self, seconds: float) -> None:
        """Let the page do what it does by itself."""
        self.ask(f"new Promise((resolve) => setTimeout(resolve, {1000 * seconds}))")


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as loop:
        yield loop


@pytest.fixture(scope="session")
def browser(loop: LoopThread) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here; `make browser` installs one, or set CHROMIUM=/path/to/it")
    context = running(program)
    yield loop.enter(context)
    loop.leave(context)


@pytest.fixture
def page_server(loop: LoopThread) -> Iterator[PageServer]:
    with PageServer(loop) as server:
        yield server


@pytest.fixture
def page(browser: Browser, loop: LoopThread, page_server: PageServer) -> Iterator[Page]:
    context = browser.tab()
    page = Page(loop.enter(context), loop, page_server)
    page.look()
    yield page
    loop.leave(context)
