"""What the router said, in another process than the one that heard it."""

from __future__ import annotations

from multiprocessing import get_context

import pytest

from sglang_afd.registrar.told import Told, ToldPage
from sglang_afd.shared_page import SharedPage


def test_nothing_was_said_before_a_router_answers() -> None:
    assert ToldPage().read() == Told(urls=(), reason="no router has answered yet")


def test_addresses_stay_when_the_router_names_none() -> None:
    page = ToldPage()
    page.write(urls=("http://h:1",), reason="")

    page.write(urls=(), reason="no router answers")

    assert page.read() == Told(urls=("http://h:1",), reason="no router answers")


def _write(page: ToldPage) -> None:
    page.write(urls=("http://h:1", "http://h:2"), reason="moved")


def test_another_process_reads_it() -> None:
    page = ToldPage()
    writer = get_context("fork").Process(target=_write, args=(page,))
    writer.start()
    writer.join()

    assert page.read() == Told(urls=("http://h:1", "http://h:2"), reason="moved")


def test_what_does_not_fit_a_page_is_refused_and_what_was_shown_stays() -> None:
    page = SharedPage(8)
    page.write(b"12345678")

    with pytest.raises(AssertionError, match="9 bytes do not fit a page of 8"):
        page.write(b"123456789")

    assert page.read() == b"12345678"
