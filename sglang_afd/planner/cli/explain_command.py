"""`explain`: a report of one page, as HTML or for a terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.planner.answer import answer
from sglang_afd.planner.cli import text
from sglang_afd.planner.cli.inputs import add_input_arguments, add_jitter_argument, read_inputs
from sglang_afd.planner.cli.search_flags import add_search_arguments, read_space
from sglang_afd.planner.launch_lines import checkpoint, launch
from sglang_afd.planner.report.contents import Contents, contents
from sglang_afd.planner.report.page import page
from sglang_afd.planner.report.terminal import terminal_lines
from sglang_afd.planner.site import Site


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags."""
    add_input_arguments(parser)
    add_jitter_argument(parser)
    add_search_arguments(parser)
    group = parser.add_argument_group("Output")
    group.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="write a page that loads nothing. Default: the terminal.",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report."""
    inputs = read_inputs(args)
    space = read_space(args, inputs.scenario)
    site = Site(scenario=inputs.scenario)
    answered = answer(inputs.fitted, site, space, model_noise=inputs.model_noise)
    shown = contents(site, space, answered)
    about = text.inputs_sentences(inputs)
    if shown is None:
        missing = "colocated" if answered.found.colocated.best is None else "disaggregated"
        raise ConfigError(
            f"explain: no {missing} deployment fits on up to {space.max_gpus} GPUs within the "
            "limits, so there is nothing to compare; see what `search` says"
        )
    if args.html is None:
        assert answered.verdict is not None, "contents are made of two deployments only"
        report = [*text.inputs_lines(inputs), "", *text.verdict_lines(answered.verdict), ""]
        report += [*terminal_lines(shown), "", *text.speed_up_lines(shown.result)]
        sys.stdout.write("\n".join(report) + "\n")
        return 0
    model_path = checkpoint(args.model, inputs.scenario.shape.name)
    _write(args.html, page(shown, about, _commands(shown, model_path)))
    sys.stdout.write(f"wrote {args.html}\n")
    return 0


def _commands(shown: Contents, model_path: str) -> list[str]:
    lines = launch(shown.site.scenario, shown.result.disaggregated.deployment, model_path)
    return [*(f"# {note}" for note in lines.notes), *(line.text for line in lines.lines)]


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written ({error})") from error
