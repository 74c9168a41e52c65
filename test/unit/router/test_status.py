"""Ctrl-C while the program looks, where Python may drop the exception of a signal."""

from __future__ import annotations

import signal

import msgspec
import pytest
from page_scenes import Ready

from sgl_router_afd import status


def test_ctrl_c_whose_exception_is_dropped_ends_watching_after_the_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(base: str, key: bytes) -> bytes:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return msgspec.json.encode(Ready().step())

    def sleep(seconds: float) -> None:
        pytest.fail("it waits for the next look")

    monkeypatch.setattr(status, "fetch", fetch)
    monkeypatch.setattr(status.time, "sleep", sleep)
    before = signal.getsignal(signal.SIGINT)

    code = status.main(["http://127.0.0.1:1", "--watch", "0.1", "--json"])

    assert code == status.Exit.READY
    assert capsys.readouterr().out.count("\n") == 1
    assert signal.getsignal(signal.SIGINT) is before
