"""`search`: the best deployment of either kind, and whether AFD pays."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.planner.answer import Answered, answer
from sglang_afd.planner.cli import as_json, text
from sglang_afd.planner.cli.inputs import (
    Inputs,
    add_input_arguments,
    add_jitter_argument,
    read_inputs,
)
from sglang_afd.planner.cli.search_flags import add_search_arguments, read_space
from sglang_afd.planner.launch_lines import Launch, Line, checkpoint, launch
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.search import front
from sglang_afd.planner.site import Site
from sglang_afd.planner.speedup import SpeedUp, speed_up
from sglang_afd.planner.verdict import Answer

_ROWS_OF_A_FRONT = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags."""
    add_input_arguments(parser)
    add_jitter_argument(parser)
    add_search_arguments(parser)
    group = parser.add_argument_group("Output")
    group.add_argument(
        "--commands",
        metavar="FILE",
        type=Path,
        help="write all command lines of the best disaggregated deployment to FILE.",
    )
    group.add_argument("--json", action="store_true", help="print JSON.")


def run(args: argparse.Namespace) -> int:
    """Print the verdict, what it is made of, and how to start the winner."""
    inputs = read_inputs(args)
    space = read_space(args, inputs.scenario)
    site = Site(scenario=inputs.scenario)
    answered = answer(inputs.fitted, site, space, model_noise=inputs.model_noise)
    result = _speed_up(inputs, answered)
    best = answered.found.disaggregated.best
    lines = None
    if best is not None:
        model_path = checkpoint(args.model, inputs.scenario.shape.name)
        lines = launch(inputs.scenario, best.deployment, model_path)
    if args.commands is not None:
        _write_commands(args.commands, lines)
    if args.json:
        as_json.write_json(_as_json(inputs, answered, result, lines))
    else:
        report = [*text.inputs_lines(inputs), "", *_report(answered, result, lines, space.max_gpus)]
        sys.stdout.write("\n".join(report) + "\n")
    return 0


def _write_commands(path: Path, lines: Launch | None) -> None:
    if lines is None:
        raise ConfigError(f"--commands {path}: no disaggregated deployment fits")
    written = [f"# {note}" for note in lines.notes]
    written += [f"{line.text}  # on {line.host}" for line in lines.lines]
    try:
        path.write_text("\n".join(written) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--commands {path}: cannot be written ({error})") from error


def _speed_up(inputs: Inputs, answered: Answered) -> SpeedUp | None:
    base, other = answered.found.colocated.best, answered.found.disaggregated.best
    if base is None or other is None:
        return None
    return speed_up(inputs.scenario, base.deployment, other.deployment)


def _report(
    answered: Answered, result: SpeedUp | None, lines: Launch | None, max_gpus: int
) -> list[str]:
    found = answered.found
    report = _verdict(answered, result, max_gpus)
    sides = (("best disaggregated", found.disaggregated), ("best colocated", found.colocated))
    for name, side in sides:
        if side.best is not None:
            report += ["", f"{name}:", *text.prediction_lines(side.best)]
    for name, side in sides:
        if side.best is not None:
            report += ["", f"front of {name[5:]} deployments:", *_front(front(side.tried))]
    if lines is not None:
        report += ["", "to start the best disaggregated deployment:", *_launch(lines)]
        if answered.answer is not Answer.PAYS:
            report += ["", "These lines are for a trial; the verdict above does not ask for them."]
    return report


def _verdict(answered: Answered, result: SpeedUp | None, max_gpus: int) -> list[str]:
    found = answered.found
    if answered.verdict is None or result is None:
        if answered.answer is Answer.UNCERTAIN:
            kept = "disaggregated" if found.colocated.best is None else "colocated"
            return [
                f"UNCERTAIN whether AFD pays: of up to {max_gpus} GPUs only a {kept} deployment "
                "keeps the limit, by less than predictions are off"
            ]
        if found.colocated.best is None:
            return [
                f"AFD PAYS: no colocated deployment of up to {max_gpus} GPUs fits within the "
                "limits, a disaggregated one does"
            ]
        return [
            f"AFD DOES NOT PAY: no disaggregated deployment of up to {max_gpus} GPUs fits within "
            "the limits, a colocated one does"
        ]
    return [*text.verdict_lines(answered.verdict), *text.speed_up_lines(result)]


def _front(points: Sequence[Prediction]) -> list[str]:
    head = ["deployment", "batch", "ms a token", "tokens/s per GPU"]
    return text.table(
        head,
        [
            (
                point.deployment.label,
                point.deployment.batch_per_attn_gpu,
                f"{point.tpot_us / 1000:.2f}",
                f"{point.tokens_per_s_per_gpu:.0f}",
            )
            for point in _thinned(points)
        ],
    )


def _thinned(points: Sequence[Prediction]) -> list[Prediction]:
    """Evenly spread, the first and the last among them."""
    if len(points) <= _ROWS_OF_A_FRONT:
        return list(points)
    last = len(points) - 1
    chosen = {round(i * last / (_ROWS_OF_A_FRONT - 1)) for i in range(_ROWS_OF_A_FRONT)}
    return [points[i] for i in sorted(chosen)]


def _launch(lines: Launch) -> list[str]:
    report = [f"  {lines.router.text}"]
    for kind in (lines.mlp, lines.attn):
        report.append(f"  {kind[0].text}")
        if len(kind) > 1:
            report.append(f"  # ... and {len(kind) - 1} more, as --commands FILE writes them")
    return [*report, *[row for note in lines.notes for row in text.wrapped("note", note)]]


def _as_json(
    inputs: Inputs, answered: Answered, result: SpeedUp | None, lines: Launch | None
) -> dict[str, Any]:
    found, verdict = answered.found, answered.verdict
    return {
        "inputs": as_json.inputs_json(inputs),
        "answer": answered.answer.value,
        "verdict": None if verdict is None else as_json.verdict_json(verdict),
        "speed_up": None if result is None else as_json.speed_up_json(result),
        **{
            name: None if side.best is None else as_json.prediction_json(side.best)
            for name, side in (
                ("disaggregated", found.disaggregated),
                ("colocated", found.colocated),
            )
        },
        "front": {
            name: [as_json.prediction_json(point) for point in front(side.tried)]
            for name, side in (
                ("disaggregated", found.disaggregated),
                ("colocated", found.colocated),
            )
        },
        "commands": [] if lines is None else [_line_json(line) for line in lines.lines],
        "notes": [] if lines is None else list(lines.notes),
    }


def _line_json(line: Line) -> dict[str, Any]:
    return {"host": line.host, "argv": list(line.argv)}
