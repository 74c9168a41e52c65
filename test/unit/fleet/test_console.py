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


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("ascii", rb"caf\xe9 \u20ac"),
        ("latin-1", b"caf\xe9 " + rb"\u20ac"),
        ("utf-8", "caf\u00e9 \u20ac".encode()),
    ],
)
def test_letters_that_the_terminal_lacks_are_spelled(encoding: str, written: bytes) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(quiet=False, log=terminal, out=terminal)

    console.answer("caf\u00e9 \u20ac")

    assert terminal.buffer.getvalue() == written  # type: ignore[attr-defined]


def test_a_launcher_without_standard_streams_prints_to_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("sys.stdout", None)
    console = Console(quiet=False)

    console.progress("starting")
    console.answer("Paris")
