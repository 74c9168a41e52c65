from __future__ import annotations

import pytest

from sglang_afd.fleet.config import parse_args


@pytest.mark.parametrize("argv", [["--prompt", ""], ["--prompt=  "]])
def test_an_empty_prompt_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)

    assert caught.value.code == 2
    assert "--prompt is empty" in capsys.readouterr().err


def test_a_flag_of_sglang_is_sent_behind_the_separator(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--dtype", "float32"])

    assert "SGLang's flags go after --" in capsys.readouterr().err
    assert parse_args(["--", "--dtype", "float32"]).server_args == ("--dtype", "float32")
