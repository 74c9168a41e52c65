from __future__ import annotations

from pathlib import Path

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.fleet.config import parse_args
from sglang_afd.model_config import require_experts


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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--attn-args=--foo 'x"], "is not what a shell takes: No closing quotation"),
        (["--sm-share", "attn=\u00b2"], "is nothing like attn=50,mlp=100"),
        (["--model-path", "x" * 5000], "is no directory"),
    ],
)
def test_what_python_itself_stumbles_over_is_refused_in_words(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[" * 200_000, None], ids=["nested", "long"])
def test_a_config_without_an_end_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "config.json"
    if content is None:
        path.symlink_to("/dev/zero")
    else:
        path.write_text(content)

    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        require_experts(str(tmp_path), "{}")
