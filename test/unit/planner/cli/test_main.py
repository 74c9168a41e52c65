"""The program: what it needs, what it says without a command, how its commands are found."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.__main__ import COMMANDS, main, usage
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.known_models import known_shape

INPUTS = ["--model", "Qwen3-30B-A3B", "--gpu", "H200", "--source", "roofline", "--context", "4096"]
# msgspec takes typing_extensions where it is there.
NEEDED = {"numpy", "msgspec", "typing_extensions", "sglang_afd"}


@pytest.mark.parametrize("command", ["predict", "search", "explain", "what-if", "simulate"])
def test_a_command_needs_numpy_and_msgspec_and_nothing_else(command: str) -> None:
    arguments = [command, *INPUTS]
    if command in ("predict", "simulate"):
        arguments += ["--attn-gpus", "4", "--mlp-gpus", "4"]
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from sglang_afd.planner.__main__ import main\n"
        f"code = main({arguments!r})\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        f"more = new - sys.stdlib_module_names - {NEEDED!r}\n"
        "more = {name for name in more if sys.modules.get(name) and sys.modules[name].__spec__}\n"
        "sys.exit(code or ','.join(sorted(more)) or 0)"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--help"])

    assert code == 0
    assert capsys.readouterr().out == usage()
    for name, command in COMMANDS.items():
        assert name in usage()
        assert command.summary in usage()


def test_every_command_can_be_built_and_every_flag_has_help() -> None:
    for name, command in COMMANDS.items():
        parser = command.parser(name)
        flags = [action for action in parser._actions if action.option_strings]
        assert len(flags) > 3
        if name not in ("profile", "simulate"):
            assert all(action.help for action in flags)


def test_flags_cannot_be_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["search", *INPUTS, "--max-gpu", "8"])

    assert code == 2
    assert "unrecognized arguments: --max-gpu 8" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_the_program_quietly() -> None:
    command = [sys.executable, "-m", "sglang_afd.planner", "search", *INPUTS, "--json"]

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()

    assert errors == ""
    assert process.returncode == 0


def test_an_answer_that_cannot_be_written_is_one_line_and_no_success() -> None:
    command = [sys.executable, "-m", "sglang_afd.planner", "search", *INPUTS]

    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert ended.returncode == 1
    assert ended.stderr.startswith("error: the answer cannot be written")
    assert ended.stderr.count("\n") == 1


def test_a_closed_standard_output_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)

    code = main(["search", *INPUTS])

    assert code == 2
    assert "standard output is closed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a\x1b[31mred", "two\nlines"])
def test_a_name_cannot_move_the_cursor(name: str) -> None:
    with pytest.raises(ConfigError, match="has control characters"):
        replace(known_shape("Qwen3-30B-A3B"), name=name)
    with pytest.raises(ConfigError, match="has control characters"):
        replace(GPUS["H200"], name=name)
