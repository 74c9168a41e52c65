"""docs/cli.md names every flag, default, endpoint and metric that the programs have."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from router_fleet import RouterFleet

from sgl_router_afd import endpoints, status
from sgl_router_afd import flags as router_flags
from sgl_router_afd.metrics import render as render_router
from sglang_afd import cli, merge_traces
from sglang_afd.demo import __main__ as demo
from sglang_afd.fleet import config as launch_config
from sglang_afd.mlp.board import Board
from sglang_afd.mlp.board_metrics import render
from sglang_afd.planner import __main__ as planner

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## `?([^`\n]+)`?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def flags_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def demo_parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    caught: list[argparse.ArgumentParser] = []

    def parse_args(parser: argparse.ArgumentParser, argv: object = None) -> argparse.Namespace:
        caught.append(parser)
        return argparse.Namespace()

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    demo.parse_args([])
    return caught[0]


def rows_of(text: str) -> dict[str, str]:
    return {
        match[1]: match[0] for match in re.finditer(r"^\| `(--[a-z-]+)[^\n]*", text, re.MULTILINE)
    }


def check(section: str, parser: argparse.ArgumentParser) -> None:
    check_rows(section, rows_of(SECTIONS[section]), parser)


def check_rows(section: str, rows: dict[str, str], parser: argparse.ArgumentParser) -> None:
    for action in flags_of(parser):
        flag = next(option for option in action.option_strings if option.startswith("--"))
        if flag == "--help":
            continue
        assert flag in rows, f"{section}: {flag} has no row"
        if isinstance(action.default, int | float) and not isinstance(action.default, bool):
            shown = rows[flag].replace("\\|", "").split("|")[2].strip()
            if action.default != -1:
                assert float(shown) == action.default, f"{section}: default of {flag}"


def test_every_flag_of_the_servers_is_on_the_page() -> None:
    check("python -m sglang_afd.launch_server", cli.build_parser())


def test_every_flag_of_the_launcher_is_on_the_page() -> None:
    check("python -m sglang_afd.launch", launch_config._build_parser())


def test_every_flag_of_the_router_is_on_the_page() -> None:
    check("python -m sgl_router_afd.launch_router", router_flags._build_parser())


def test_every_flag_of_the_status_program_is_on_the_page() -> None:
    check("python -m sgl_router_afd.status", status.build_parser())


def test_every_flag_of_the_model_builder_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    check("python -m sglang_afd.demo", demo_parser(monkeypatch))


PLANNER = re.split(r"^### ", SECTIONS["python -m sglang_afd.planner"], flags=re.MULTILINE)
PARTS = {part.splitlines()[0].replace("`", ""): rows_of(part) for part in PLANNER}
# Commands that take the flags of another one, too; a flag of their own comes last and counts.
SHARED = {
    "predict": ["predict"],
    "search": ["search"],
    "explain": ["search", "explain"],
    "what-if": ["search", "what-if"],
    "simulate": ["predict", "simulate"],
}


@pytest.mark.parametrize("command", planner.COMMANDS)
def test_every_flag_of_the_planner_is_on_the_page_and_no_other(command: str) -> None:
    rows: dict[str, str] = {}
    for name in ["Every command but profile", *SHARED.get(command, [])]:
        rows |= PARTS[name]
    if command == "profile":
        rows = PARTS[command]
    parser = planner.COMMANDS[command].parser(command)

    check_rows(f"planner {command}", rows, parser)

    known = {option for action in flags_of(parser) for option in action.option_strings}
    assert set(PARTS[command]) <= known


def test_the_merge_tool_has_no_flags_and_its_arguments_are_on_the_page() -> None:
    section = "python -m sglang_afd.merge_traces"
    parser = merge_traces.build_parser()

    check(section, parser)

    shown = [str(action.metavar) for action in parser._actions if not action.option_strings]
    assert f"{section} {' '.join(shown)}..." in SECTIONS[section]


def test_every_flag_with_our_prefix_on_the_page_exists() -> None:
    known = {option for action in flags_of(cli.build_parser()) for option in action.option_strings}

    assert set(re.findall(r"--afd-[a-z-]+", PAGE)) <= known


@pytest.mark.parametrize("path", [*endpoints.OWN, *endpoints.RELAYED])
def test_every_endpoint_of_the_router_is_on_the_page(path: str) -> None:
    assert f"`{path}`" in SECTIONS["Endpoints"].replace("`GET ", "`")


def test_every_metric_is_on_the_page_and_no_other() -> None:
    text = render(Board(1), rank=0, first_expert=0).decode()
    exposed = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))

    assert set(re.findall(r"sglang_afd_mlp_[a-z_]+", PAGE)) == exposed


def test_every_metric_of_the_router_is_on_the_page_and_no_other() -> None:
    fleet = RouterFleet()

    text = render_router(fleet.shared, fleet.fleet)
    exposed = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))

    assert set(re.findall(r"`(sgl_router_afd_[a-z_]+)`", PAGE)) == exposed


def test_the_pages_programs_are_modules_of_this_package() -> None:
    programs = [name.split()[-1] for name in SECTIONS if name.startswith("python -m")]

    assert len(programs) == 7
    for name in programs:
        path = Path(__file__).parents[2] / Path(*name.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
