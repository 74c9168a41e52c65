from __future__ import annotations

import dataclasses

import pytest

from sglang_afd import cli
from sglang_afd.config import AfdConfig, Role
from sglang_afd.errors import ConfigError

ATTN = ["--role", "attn", "--afd-mlp", "http://127.0.0.1:30010"]


def flags_by_field() -> dict[str, list[str]]:
    return {action.dest: action.option_strings for action in cli.build_parser()._actions}


def test_every_field_of_the_config_has_a_flag_with_help_and_the_configs_default() -> None:
    actions = {action.dest: action for action in cli.build_parser()._actions}

    for field in dataclasses.fields(AfdConfig):
        assert actions[field.name].help
        if field.name != "role":
            assert actions[field.name].default == field.default


def test_the_help_names_every_flag_and_shows_defaults() -> None:
    text = " ".join(cli.build_parser().format_help().split())  # however wide the terminal is

    for options in flags_by_field().values():
        assert options[0] in text
    assert "Default: 2048." in text
    assert "Default: 60." in text
    assert text.startswith("usage: python -m sglang_afd.launch_server --role attn|mlp ")


@pytest.mark.parametrize(
    ("argv", "asks"),
    [(["--help"], True), (["--role", "attn", "-h"], True), ([], False), (["--helpme"], False)],
)
def test_help_is_asked_for_by_either_name(argv: list[str], asks: bool) -> None:
    assert cli.wants_help(argv) is asks


def test_defaults_are_those_of_the_config() -> None:
    config, rest = cli.parse(["--role", "mlp"])

    assert config == AfdConfig(role=Role.MLP)
    assert rest == []


def test_our_flags_are_taken_and_the_others_are_left_in_order() -> None:
    argv = ["--model-path", "m", *ATTN, "--afd-max-rows", "7", "--port", "1", "--chunked", "x"]

    config, rest = cli.parse(argv)

    assert config == AfdConfig(role=Role.ATTN, mlp_url="http://127.0.0.1:30010", max_rows=7)
    assert rest == ["--model-path", "m", "--port", "1", "--chunked", "x"]


def test_every_flag_reaches_its_field() -> None:
    shared = [
        *("--afd-secret-file", "s", "--afd-max-rows", "1", "--afd-heartbeat-timeout", "2"),
        *("--afd-transport", "cuda_ipc", "--afd-dispatch-dtype", "fp8"),
        "--afd-allow-untested-model",
    ]
    of_attn = ["--afd-stall-timeout", "3", "--afd-attach-timeout", "4"]
    of_mlp = [
        *("--afd-ep-rank", "1", "--afd-leader", "http://h", "--afd-listen", "ipc:///x"),
        *("--afd-max-peers", "5"),
    ]

    attn, _ = cli.parse([*ATTN, *shared, *of_attn])
    mlp, _ = cli.parse(["--role", "mlp", *shared, *of_mlp])

    common = {
        "secret_file": "s",
        "max_rows": 1,
        "heartbeat_timeout_s": 2.0,
        "transport": "cuda_ipc",
        "dispatch_dtype": "fp8",
        "allow_untested_model": True,
    }
    assert attn == AfdConfig(
        role=Role.ATTN,
        mlp_url="http://127.0.0.1:30010",
        stall_timeout_s=3.0,
        attach_timeout_s=4.0,
        **common,
    )
    assert mlp == AfdConfig(
        role=Role.MLP,
        ep_rank=1,
        leader_url="http://h",
        listen="ipc:///x",
        max_peers=5,
        **common,
    )


@pytest.mark.parametrize(
    ("argv", "got"),
    [
        ([], "--role is missing"),
        (["--afd-mlp", "http://h"], "--role is missing"),
        (["--role", "expert"], "--role expert is not a role"),
        (["--role", "ATTN"], "--role ATTN is not a role"),
        (["--role="], "--role  is not a role"),
    ],
)
def test_a_missing_or_wrong_role_is_refused_with_both_roles(argv: list[str], got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.parse(argv)

    assert str(caught.value).startswith(f"{got}; use --role attn")
    assert "--role mlp" in str(caught.value)
    assert "python -m sglang.launch_server" in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--afd-mpl", "did you mean --afd-mlp?"),
        ("--afd-max-row=3", "did you mean --afd-max-rows?"),
        ("--afd-stall-timeout-s", "did you mean --afd-stall-timeout?"),
        ("--afd-zzzzzzzzzzzzzzzzzzz", "see --help for those that exist"),
    ],
)
def test_an_unknown_flag_of_ours_is_refused_with_the_closest(argument: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.parse([*ATTN, argument, "x"])

    assert str(caught.value) == f"unknown flag {argument.split('=')[0]}; {hint}"


def test_an_abbreviation_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match="unknown flag --afd-max-r"):
        cli.parse([*ATTN, "--afd-max-r", "3"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--afd-max-rows", "many"], "--afd-max-rows: invalid int value: 'many'; see --help"),
        (["--afd-max-rows", "1.5"], "invalid int value: '1.5'"),
        (["--afd-stall-timeout", "soon"], "--afd-stall-timeout: invalid float value: 'soon'"),
        (["--afd-stall-timeout"], "--afd-stall-timeout: expected one argument"),
        (["--afd-max-rows", "0"], "--afd-max-rows 0 is out of range; 1 to 65536 are allowed"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_instead_of_exiting(
    argv: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cli.parse([*ATTN, *argv])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--config=a.yaml", "--port=1"], ["--config", "a.yaml", "--port=1"]),
        (["--config", "a.yaml"], ["--config", "a.yaml"]),
        (["--config="], ["--config="]),
        (["--config-format=x", "x=--config"], ["--config-format=x", "x=--config"]),
    ],
)
def test_a_joined_config_flag_is_split(argv: list[str], expected: list[str]) -> None:
    assert cli.split_config(argv) == expected
