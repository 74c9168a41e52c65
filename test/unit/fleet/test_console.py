"""What the launcher prints can be lost; the launcher cannot."""

from __future__ import annotations

import io
import os

import pytest

from sglang_afd.fleet.console import Console


def test_a_reader_that_is_gone_is_not_missed() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        console = Console(quiet=False, log=pipe, out=pipe)

        console.progress("starting")
        console.server_line("mlp-0", "ready")
        console.answer("Paris")


def test_letters_that_the_terminal_lacks_are_spelled() -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(quiet=False, log=terminal, out=terminal)

    console.answer("caf\u00e9")

    assert terminal.buffer.getvalue() == b"caf\\xe9"  # type: ignore[attr-defined]


def test_a_launcher_without_standard_streams_prints_to_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("sys.stdout", None)
    console = Console(quiet=False)

    console.progress("starting")
    console.answer("Paris")
