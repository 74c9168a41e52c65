"""Draws a few layers of one step of a merged trace: who computed, who waited, and for whom.

    python -m sglang_afd.merge_traces trace.json attn.json mlp.json
    python benchmark/plot_trace.py trace.json picture.png [--step 40] [--layers 3]

Without --step it takes the decode step whose length is the median among those with the most
micro-batches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

Event = dict[str, Any]
Lane = tuple[int, int]  # process, track

COLORS = {
    "attention": "#4c78a8",
    "dispatch": "#9ecae9",
    "wait": "#e8e8e8",
    "combine": "#72b7b2",
    "run": "#f58518",
    "reply": "#ffbf79",
    "wait for rows": "#e8e8e8",
    "window wait": "#d4c5e2",
    "stall": "#e45756",
}
SHOWN_AS = {"run": "expert run", "wait for rows": "wait", "window wait": "gathering window"}
LANE_HEIGHT = 0.8


@dataclass(frozen=True, kw_only=True)
class View:
    """What part of a trace is drawn."""

    step: Event
    begin_us: float
    end_us: float


def main(argv: Sequence[str]) -> int:
    """Draw the picture that `argv` asks for; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        events = json.loads(args.trace.read_text())["traceEvents"]
        view = choose(events, args.step, args.first_layer, args.layers)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"plot_trace: error: {args.trace}: {error}", file=sys.stderr)
        return 2
    draw(events, view, args.out)
    print(f"{args.out}: {view.step['name']}, {(view.end_us - view.begin_us) / 1000:.2f} ms")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", metavar="TRACE", type=Path, help="Written by merge_traces.")
    parser.add_argument("out", metavar="OUT.png", type=Path)
    parser.add_argument("--step", type=int, help="Number of the step.")
    parser.add_argument("--first-layer", type=int, default=0, help="Counted in MoE layers.")
    parser.add_argument("--layers", type=int, default=3, help="How many.")
    return parser


def choose(events: Iterable[Event], number: int | None, first_layer: int, num_layers: int) -> View:
    """The step to draw and the time that its layers took.

    Raises:
        ValueError: There is no such step, or no such layer.
    """
    spans = [event for event in events if event["ph"] == "X"]
    steps = [span for span in spans if span["name"].startswith("step ")]
    step = _step(steps, number)
    inside = [
        span
        for span in spans
        if span["pid"] == step["pid"]
        and span["args"].get("step") == step["args"]["step"]
        and "layer" in span["args"]
    ]
    layers = sorted({span["args"]["layer"] for span in inside})
    chosen = set(layers[first_layer : first_layer + num_layers])
    if not chosen:
        raise ValueError(f"step {step['args']['step']} has {len(layers)} MoE layers")
    drawn = [span for span in inside if span["args"]["layer"] in chosen]
    begin_us = min(span["ts"] for span in drawn)
    end_us = max(span["ts"] + span["dur"] for span in drawn)
    return View(step=step, begin_us=begin_us, end_us=end_us)


def draw(events: Sequence[Event], view: View, out: Path) -> None:
    """One row for each track that has something to show."""
    shown = [
        event
        for event in events
        if event["ph"] == "X"
        and event["name"] in COLORS
        and event["ts"] < view.end_us
        and event["ts"] + event["dur"] > view.begin_us
    ]
    lanes = sorted({(event["pid"], event["tid"]) for event in shown})
    rows = {lane: len(lanes) - 1 - index for index, lane in enumerate(lanes)}
    figure, axes = pyplot.subplots(figsize=(12, 1.4 + 0.75 * len(lanes)), layout="constrained")
    for event in shown:
        _draw_span(axes, event, rows[event["pid"], event["tid"]], view)
    _draw_arrows(axes, events, rows, view)
    axes.set_yticks([rows[lane] for lane in lanes], _lane_names(events, lanes))
    axes.set_xlim(0, (view.end_us - view.begin_us) / 1000)
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_xlabel("ms")
    axes.set_title(view.step["name"], loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    names = [name for name in COLORS if any(event["name"] == name for event in shown)]
    labels = {SHOWN_AS.get(name, name): COLORS[name] for name in names}
    axes.legend(
        handles=[Patch(facecolor=color, label=label) for label, color in labels.items()],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(labels),
        frameon=False,
    )
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def _step(steps: Sequence[Event], number: int | None) -> Event:
    if number is not None:
        found = [step for step in steps if step["args"]["step"] == number]
        if not found:
            raise ValueError(f"it has no step {number}")
        return found[0]
    decode = [step for step in steps if step["args"]["kind"] == "decode"]
    if not decode:
        raise ValueError("it has no decode step; name a step with --step")
    most = max(step["args"]["micro_batches"] for step in decode)
    widest = [step for step in decode if step["args"]["micro_batches"] == most]
    return sorted(widest, key=lambda step: float(step["dur"]))[len(widest) // 2]


def _draw_span(axes: Axes, event: Event, row: int, view: View) -> None:
    begin_ms = (event["ts"] - view.begin_us) / 1000
    width_ms = event["dur"] / 1000
    axes.barh(
        row,
        width_ms,
        left=begin_ms,
        height=LANE_HEIGHT,
        color=COLORS[event["name"]],
        edgecolor="white",
        linewidth=0.4,
    )
    is_wide = width_ms * 1000 > 0.018 * (view.end_us - view.begin_us)
    if event["name"] in ("attention", "run") and is_wide:
        label = f"{event['args']['layer']}"
        if event["name"] == "run":
            label += f".{event['args']['micro_batch']}"
        middle = min(max(begin_ms, 0) + width_ms / 2, (view.end_us - view.begin_us) / 1000)
        axes.text(middle, row, label, ha="center", va="center", color="white", fontsize=8)


def _draw_arrows(axes: Axes, events: Sequence[Event], rows: dict[Lane, int], view: View) -> None:
    ends = {
        (event["pid"], event["tid"], event["ts"]): event["ts"] + event["dur"]
        for event in events
        if event["ph"] == "X" and event["name"] == "run"
    }
    arrows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f") and view.begin_us <= event["ts"] <= view.end_us:
            arrows[event["id"]].append(event)
    for points in arrows.values():
        for start, end in zip(points, points[1:], strict=False):
            if start["pid"] != view.step["pid"] and end["pid"] != view.step["pid"]:
                continue
            left_us = ends.get((start["pid"], start["tid"], start["ts"]), start["ts"])
            places = [
                ((at_us - view.begin_us) / 1000, rows[point["pid"], point["tid"]])
                for point, at_us in ((start, left_us), (end, end["ts"]))
                if (point["pid"], point["tid"]) in rows
            ]
            if len(places) == 2:
                style = {"arrowstyle": "->", "color": "#555555", "linewidth": 0.7}
                axes.annotate("", xy=places[1], xytext=places[0], arrowprops=style)


def _lane_names(events: Iterable[Event], lanes: Iterable[Lane]) -> list[str]:
    names: dict[Lane, str] = {}
    servers: dict[int, str] = {}
    for event in events:
        if event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["name"] == "process_name":
            servers[event["pid"]] = event["args"]["name"].split(" ")[0]
    return [f"{servers[lane[0]]}\n{names[lane]}" for lane in lanes]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
