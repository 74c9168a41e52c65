from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from pathlib import Path

from sgl_router_afd.page import document

ROOT = Path(__file__).parents[3]
PAGE = document.load()
TEXT = PAGE.body.decode()


def policy() -> dict[str, str]:
    rules = PAGE.headers["Content-Security-Policy"].split("; ")
    return {name: value for name, _, value in (rule.partition(" ") for rule in rules)}


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_allows_the_pages_own_script_and_style_and_no_other() -> None:
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", TEXT, re.DOTALL)
    styles = re.findall(r"<style[^>]*>(.*?)</style>", TEXT, re.DOTALL)

    rules = policy()

    assert len(scripts) == len(styles) == 1
    assert rules["script-src"] == hash_of(scripts[0])
    assert rules["style-src"] == hash_of(styles[0])
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert rules["trusted-types"] == "'none'"


def test_the_page_fetches_nothing_from_elsewhere() -> None:
    addresses = set(re.findall(r"https?://[^'\"\s)]+", TEXT))

    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name of SVG looks like an address"
    assert not re.search(r"\bsrc=|@import|url\(", TEXT)


def test_every_script_of_the_folder_is_in_the_page_and_the_wheel() -> None:
    folder = Path(document.__file__).parent / "assets"
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert {path.stem for path in folder.glob("*.js")} == set(document.SCRIPTS)
    assert config["tool"]["setuptools"]["package-data"]["sgl_router_afd.page"] == ["assets/*"]


def test_the_page_writes_text_and_never_html() -> None:
    writers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"

    assert not re.search(writers, TEXT)
