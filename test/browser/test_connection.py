"""The status page in a real browser: keys, lost routers, and answers that it cannot read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from page_scenes import Ready, answer_of, empty

if TYPE_CHECKING:
    from conftest import Page

KEY = "sesame-7"
IS_SHOWN = "!document.getElementById('view').hidden"
ASKS_FOR_KEY = "!document.getElementById('key').hidden"
COUNT_ASKING = """{ const fetch = window.fetch; window.numAsking = 0;
  window.fetch = (...what) => {
    window.numAsking += 1;
    return fetch(...what).finally(() => { window.numAsking -= 1; });
  }; } true"""
IS_OLD = r"/\b([2-9]|\d\d) s old/"  # the page may have had no time to say 2 s
IS_LOST = "!document.getElementById('lost').hidden"


def test_a_lost_router_is_told_with_the_age_of_the_picture_and_comes_back(page: Page) -> None:
    page.server.answer = Ready().step()
    page.open()
    page.until(IS_SHOWN)

    page.server.stop()

    page.until(f"{IS_LOST} && {IS_OLD}.test(document.getElementById('lost-age').innerText)")
    page.picture("lost-1280-light")
    assert page.text("#lost-what") == "The router cannot be reached: no connection."
    assert page.text("#link-text").startswith("lost, ")
    assert page.count(".group") == 1
    page.server.start()
    page.until("document.body.dataset.link === 'live'")
    assert page.ask(IS_LOST) is False


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (500, b'{"error": {"message": "it broke"}}', "it answers 500 for /afd/v1/groups: it broke"),
        (200, b"<html>", "its answer cannot be read"),
        (200, b'{"version": 2}', "it has version 2, this page knows 1"),
    ],
)
def test_an_answer_that_is_none_is_told(page: Page, status: int, body: bytes, words: str) -> None:
    page.server.answer, page.server.status = body, status

    page.open()

    page.until(IS_LOST)
    assert words in page.text("#lost-what")
    assert page.text("#lost-age") == "Nothing has been heard of it yet. Trying on."


def test_the_admin_key_is_asked_for_and_kept_for_this_tab_alone(page: Page) -> None:
    page.server.answer, page.server.key = answer_of(empty()), KEY
    page.open()
    page.until(ASKS_FOR_KEY)
    page.picture("key-1280-light")
    assert page.ask("document.activeElement.id") == "key-value"

    page.type(KEY)
    page.press("Enter")

    page.until(IS_SHOWN)
    page.open()
    page.until(IS_SHOWN)
    assert page.ask("Object.values(sessionStorage)") == [KEY]
    assert page.ask("localStorage.length + document.cookie.length") == 0
    assert KEY not in page.ask("document.documentElement.outerHTML")
    page.ask("document.getElementById('forget').click()")
    page.until(ASKS_FOR_KEY)
    assert page.ask("sessionStorage.length") == 0


def test_a_wrong_key_is_told(page: Page) -> None:
    page.server.answer, page.server.key = answer_of(empty()), KEY
    page.open()
    page.until(ASKS_FOR_KEY)

    page.type("wrong")
    page.press("Enter")

    page.until("document.getElementById('key-why').innerText.includes('refused the key')")
    assert page.ask("document.getElementById('view').hidden") is True
    assert page.ask("sessionStorage.length") == 0


def test_a_router_that_waits_for_a_key_is_not_asked_all_the_time(page: Page) -> None:
    page.server.key = KEY
    page.open()
    page.until(ASKS_FOR_KEY)
    num_asked = page.server.num_asked

    page.rest(1.5)

    assert page.server.num_asked == num_asked


def test_it_can_be_paused_and_gone_through_with_the_keyboard(page: Page) -> None:
    scene = Ready()
    page.server.answer = scene.step()
    page.open()
    page.until(IS_SHOWN)
    page.ask(COUNT_ASKING)
    page.until_asked_again()
    shown = page.text('[data-tile="tokens"] .number')
    page.press("Tab")
    assert page.ask("document.activeElement.id") == "pause"

    page.press("Enter")

    page.until("document.body.dataset.link === 'paused'")
    page.until("window.numAsking === 0")  # what was asked before comes still
    page.server.answer = scene.step()
    page.rest(1.5)
    assert page.text('[data-tile="tokens"] .number') == shown
    page.press("Tab", "Enter")
    assert page.ask("document.activeElement.tagName + document.querySelector('details').open") == (
        "SUMMARYtrue"
    )
