"""Every scene at both widths, light and dark: nothing overflows, all can read it; pictures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_scenes import Ready, answer_of, empty, hostile, many, troubled

if TYPE_CHECKING:
    from conftest import Page

SCENES = {
    "ready": lambda: Ready().step(),
    "troubled": lambda: answer_of(troubled()),
    "empty": lambda: answer_of(empty()),
    "hostile": lambda: answer_of(hostile("unbroken" * 200)),
}
OVERFLOWING = """[...document.querySelectorAll('#view *')].filter((one) =>
  one.clientWidth > 0 && one.scrollWidth > one.clientWidth + 1
  && !one.closest('pre') && getComputedStyle(one).display !== 'inline')
  .map((one) => `${one.tagName}.${one.className} ${one.scrollWidth} > ${one.clientWidth}`)"""
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]


def axe() -> str:
    """The script of axe-core; its package asks for Playwright, so nothing of it is imported."""
    spec = importlib.util.find_spec("axe_playwright_python")
    assert spec is not None and spec.origin is not None, "`make env` installs it"
    return (Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (390, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.slow),
        pytest.param(390, "light", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", [*SCENES, pytest.param("many", marks=pytest.mark.slow)])
def test_everybody_can_read_it_and_nothing_overflows(
    page: Page, name: str, width: int, scheme: str
) -> None:
    page.server.answer = SCENES[name]() if name in SCENES else answer_of(many())
    page.look(width=width, scheme=scheme)

    page.open()

    page.until("!document.getElementById('view').hidden")
    page.picture(f"{name}-{width}-{scheme}")
    page.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.ask("document.documentElement.scrollWidth") <= width
    assert page.ask(OVERFLOWING) == []
    page.ask(f"{axe()}; true")
    found = page.ask(
        f"axe.run({{runOnly: {json.dumps(RULES)}}}).then(({{violations}}) => violations.flatMap("
        "({id, nodes}) => nodes.map((node) => `${id}: ${node.html} ${node.failureSummary}`)))"
    )
    assert found == []


def test_dark_is_dark_and_light_is_light(page: Page) -> None:
    page.server.answer = answer_of(empty())
    page.open()
    ground = "getComputedStyle(document.body).backgroundColor"

    light = page.ask(ground)
    page.look(scheme="dark")
    dark = page.ask(ground)

    assert (light, dark) == ("rgb(243, 245, 248)", "rgb(14, 19, 25)")
