"""`simulate`: plays a deployment event by event, or a recorded timeline again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.planner.cli import as_json, text
from sglang_afd.planner.cli.deployment_flags import add_deployment_arguments, read_deployment
from sglang_afd.planner.cli.inputs import add_input_arguments, read_inputs
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.simulator.accounts import NAMES
from sglang_afd.planner.simulator.flags import (
    add_simulation_arguments,
    read_disturbance,
    read_options,
)
from sglang_afd.planner.simulator.recording import read_recording
from sglang_afd.planner.simulator.replay import Replayed, replay
from sglang_afd.planner.simulator.result import Simulated
from sglang_afd.planner.simulator.simulation import simulate
from sglang_afd.planner.simulator.timeline import chrome_trace
from sglang_afd.trace.reading import read_timeline

_SHARES = {
    "attention": "computes attention and the dense rest",
    "outside": "head, sampling, start of the next step",
    "experts": "waits while experts run for it",
    "exchange": "waits for rows or results on their way",
    "barrier": "waits for rows of a slower peer",
    "queue": "waits while the MLP GPUs run something else",
    "round": "waits for a round to start",
    "fill": "waits at the last layer, where nothing overlaps",
    "prefill": "prefills",
    "failure": "servers are away",
}
assert tuple(_SHARES) == NAMES, "every account has words"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags."""
    add_input_arguments(parser)
    # Noise has flags of its own here; the closed form stays without any, to show what noise costs.
    parser.set_defaults(jitter=0.0)
    add_deployment_arguments(parser)
    add_simulation_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON.")


def run(args: argparse.Namespace) -> int:
    """Play and print."""
    if args.replay:
        _print(args, *_replay(args.replay, args.skip_steps))
        return 0
    inputs = read_inputs(args)
    prediction = read_deployment(args, inputs.scenario)
    disturbance, options = read_disturbance(args), read_options(args)
    found = simulate(inputs.scenario, prediction.deployment, disturbance, options)
    if args.timeline:
        _write(args.timeline, json.dumps(chrome_trace(found.intervals)))
    answer = {
        "inputs": as_json.inputs_json(inputs),
        "prediction": as_json.prediction_json(prediction),
        "simulation": simulation_json(found),
    }
    lines = [*text.inputs_lines(inputs), "", *_lines(prediction, found)]
    _print(args, answer, lines)
    return 0


def simulation_json(found: Simulated) -> dict[str, Any]:
    """Without the single steps and intervals."""
    fields = asdict(found)
    del fields["intervals"], fields["steps_us"]
    return fields


def _lines(prediction: Prediction, found: Simulated) -> list[str]:
    step = found.step
    groups = "1 group" if found.num_groups == 1 else f"{found.num_groups} groups"
    servers = f"{groups}, {found.num_servers} attention GPUs, {found.num_ranks} MLP GPUs"
    if found.num_stuck_groups:
        servers += f"; {found.num_stuck_groups} stand still since their MLP GPUs never come back"
    rows = [
        ("step, mean ms", f"{prediction.step_us / 1000:.2f}", f"{step.mean_us / 1000:.2f}"),
        ("step, p50 ms", "", f"{step.p50_us / 1000:.2f}"),
        ("step, p90 ms", "", f"{step.p90_us / 1000:.2f}"),
        ("step, p99 ms", "", f"{step.p99_us / 1000:.2f}"),
        (
            "time per output token, ms",
            f"{prediction.tpot_us / 1000:.2f}",
            f"{found.tpot_us / 1000:.2f}",
        ),
        (
            "tokens/s per GPU",
            f"{prediction.tokens_per_s_per_gpu:.0f}",
            f"{found.tokens_per_s_per_gpu:.0f}",
        ),
        ("attention GPUs busy", "", f"{found.attn_busy:.1%}"),
        ("MLP GPUs busy", "", f"{found.mlp_busy:.1%}"),
        ("peers in a run", "", f"{found.peers_per_run:.1f}"),
    ]
    if found.prefill.number:
        rows.append(("prefill step, mean ms", "", f"{found.prefill.mean_us / 1000:.1f}"))
    deployment = prediction.deployment
    lines = [
        f"{deployment.label}, batch {deployment.batch_per_attn_gpu}: {servers}",
        "",
        *text.table(("", "closed form", "simulated"), rows),
        "",
        "time of an attention GPU",
    ]
    shares = asdict(found.shares)
    return lines + [
        f"  {shares[name]:6.1%}  {words}" for name, words in _SHARES.items() if shares[name] > 5e-4
    ]


def _replay(paths: Sequence[Path], skip_steps: int) -> tuple[dict[str, Any], list[str]]:
    recording = read_recording([read_timeline(path) for path in paths], skip_steps)
    exact, means = replay(recording), replay(recording, as_recorded=False)
    first = (
        f"{len(recording.steps)} attention servers, {recording.num_ranks} MLP ranks, "
        f"{len(exact.of_decode())} decode steps, {len(recording.layers)} layers with experts"
    )
    rows = [
        (
            name,
            f"{each.mean_percent:+.1f} %",
            f"{each.median_abs_percent:.1f} %",
            f"{each.p90_abs_percent:.1f} %",
            f"{each.played_peers_per_run:.2f} of {each.recorded_peers_per_run:.2f}",
        )
        for name, each in (("each duration as recorded", exact), ("means of durations", means))
    ]
    head = ("decode steps off by", "mean", "median", "90th", "peers in a run")
    answer = {"as_recorded": _replay_json(exact), "means": _replay_json(means)}
    return answer, [first, "", *text.table(head, rows)]


def _replay_json(found: Replayed) -> dict[str, Any]:
    return {
        "steps": len(found.of_decode()),
        "mean_pct": found.mean_percent,
        "median_abs_pct": found.median_abs_percent,
        "p90_abs_pct": found.p90_abs_percent,
        "recorded_peers_per_run": found.recorded_peers_per_run,
        "played_peers_per_run": found.played_peers_per_run,
        "recorded_ms": found.recorded_us / 1000,
        "played_ms": found.played_us / 1000,
    }


def _print(args: argparse.Namespace, answer: dict[str, Any], lines: list[str]) -> None:
    if args.json:
        as_json.write_json(answer)
    else:
        sys.stdout.write("\n".join(lines) + "\n")


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--timeline {path}: cannot be written ({error.strerror})") from error
