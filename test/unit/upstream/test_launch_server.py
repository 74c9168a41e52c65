"""The program `launch_server` before there is a server."""

from __future__ import annotations

import pytest

from sglang_afd import launch_server


def test_ctrl_c_while_loading_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_server, "_main", interrupted)
    monkeypatch.setattr(launch_server, "announce_as_parent", lambda: None)

    assert launch_server.main(["--role", "attn"]) == 130
    assert capsys.readouterr() == ("", "")
