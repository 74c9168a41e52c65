"""Benchmarks are scripts: they run in a clone where this package is not installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmark").glob("bench_*.py"))
IMPORT = re.compile(r"^(?:from|import) sglang_afd\b", re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_finds_the_package_beside_it_before_it_imports_it(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    first = IMPORT.search(text)

    assert first is None or "sys.path." in text[: first.start()]
