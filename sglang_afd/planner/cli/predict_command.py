"""`predict`: one deployment, and its speed-up over a colocated one."""

from __future__ import annotations

import argparse
import sys

from sglang_afd.planner.answer import compare
from sglang_afd.planner.cli import as_json, text
from sglang_afd.planner.cli.deployment_flags import (
    add_deployment_arguments,
    read_baseline,
    read_deployment,
)
from sglang_afd.planner.cli.inputs import add_input_arguments, add_jitter_argument, read_inputs
from sglang_afd.planner.deployment import Mode
from sglang_afd.planner.site import Site
from sglang_afd.planner.speedup import speed_up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags."""
    add_input_arguments(parser)
    add_jitter_argument(parser)
    add_deployment_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON.")


def run(args: argparse.Namespace) -> int:
    """Print the prediction."""
    inputs = read_inputs(args)
    scenario = inputs.scenario
    prediction = read_deployment(args, scenario)
    deployment = prediction.deployment
    error = inputs.fitted.relative_error(scenario, deployment)
    error = (error**2 + inputs.model_noise**2) ** 0.5
    lines = [*text.inputs_lines(inputs), "", *text.prediction_lines(prediction, error)]
    answer = {
        "inputs": as_json.inputs_json(inputs),
        "prediction": {**as_json.prediction_json(prediction), "step_relative_error": error},
    }
    if deployment.mode is not Mode.COLOCATED:
        baseline = read_baseline(args, scenario, deployment.total_gpus)
        result = speed_up(scenario, baseline.deployment, deployment)
        verdict = compare(
            inputs.fitted,
            Site(scenario=scenario),
            baseline,
            prediction,
            model_noise=inputs.model_noise,
        )
        answer["baseline"] = as_json.prediction_json(baseline)
        answer["speed_up"] = as_json.speed_up_json(result)
        answer["verdict"] = as_json.verdict_json(verdict)
        lines += ["", "compared with:", *text.prediction_lines(baseline), ""]
        lines += [*text.speed_up_lines(result), "", *text.verdict_lines(verdict)]
    if args.json:
        as_json.write_json(answer)
    else:
        sys.stdout.write("\n".join(lines) + "\n")
    return 0
