"""docs/upstream.md names every touch-point; what it omits, nobody checks at an upgrade."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import sglang_afd
from sglang_afd.upstream import cpu_shim, versions
from sglang_afd.upstream.cpu_bodies import BODIES

ROOM = Path(sglang_afd.__file__).parent / "upstream"
PAGE = (Path(__file__).parents[3] / "docs" / "upstream.md").read_text(encoding="utf-8")
IN_CODE_MARKS = set(re.findall(r"[\w.]+", " ".join(re.findall(r"`([^`\n]+)`", PAGE))))


def names_imported_from_sglang() -> list[str]:
    return sorted(
        {
            alias.name
            for file in ROOM.glob("*.py")
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang"
            for alias in node.names
        }
    )


def modules_imported_whole() -> list[str]:
    return [
        alias.name
        for file in ROOM.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] == "sglang"
    ]


def hook_targets() -> list[str]:
    """The values of the room's constants whose names end in HOOK or HOOKS."""
    targets: list[str] = []
    for file in ROOM.glob("[a-z]*.py"):
        module = importlib.import_module(f"sglang_afd.upstream.{file.stem}")
        for name, value in vars(module).items():
            if name.endswith("_HOOK"):
                targets.append(value)
            elif name.endswith("_HOOKS"):
                targets += value
    return sorted(set(targets))


@pytest.mark.parametrize("name", names_imported_from_sglang())
def test_every_name_imported_from_sglang_is_explained(name: str) -> None:
    assert name in IN_CODE_MARKS


def test_nothing_is_imported_from_sglang_as_a_whole_module() -> None:
    assert modules_imported_whole() == []


@pytest.mark.parametrize("target", hook_targets())
def test_every_hook_has_its_row(target: str) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{target}` |")]

    assert len(rows) == 1


def test_the_table_of_hooks_has_no_row_without_a_hook() -> None:
    rows = re.findall(r"^\| `(sglang\.[\w.]+)` \|", PAGE, re.MULTILINE)

    assert sorted(rows) == hook_targets()


def test_every_part_of_the_shim_is_explained() -> None:
    parts = {
        *cpu_shim._KERNEL_PACKAGES,
        *(f"{module}.{name}" for module, names in BODIES.items() for name in names),
    }

    assert parts <= IN_CODE_MARKS


def test_the_page_tells_of_the_pinned_version() -> None:
    assert f"**{versions.SGLANG_VERSION}**" in PAGE
