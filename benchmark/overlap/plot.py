"""The sweep as a picture: step time over the ratio of the delays, beside the ideal curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(points: Sequence[dict[str, Any]], num_layers: int, file: Path) -> None:
    """Write a PNG with one panel for each N:M."""
    shapes = sorted({(point["m"], point["n"]) for point in points})
    figure, panels = pyplot.subplots(
        1, len(shapes), figsize=(4.2 * len(shapes), 4), sharey=True, squeeze=False
    )
    for panel, (num_mlp, number) in zip(panels[0], shapes, strict=True):
        here = [point for point in points if (point["m"], point["n"]) == (num_mlp, number)]
        _draw_panel(panel, here)
        panel.set_title(f"{number} attention : {num_mlp} MLP")
        panel.set_xlabel("expert delay / attention delay")
    panels[0][0].set_ylabel(f"time of a step of {num_layers} layers, ms")
    panels[0][0].set_ylim(0, 1.05 * max(point["step_ms"] for point in points))
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _draw_panel(panel: Any, points: Sequence[dict[str, Any]]) -> None:
    for micro_batches, colour in ((1, "tab:blue"), (2, "tab:orange")):
        mine = [point for point in points if point["micro_batches"] == micro_batches]
        ratios = [point["expert_ms"] / point["attn_ms"] for point in mine]
        measured = [point["step_ms"] for point in mine]
        label = f"{micro_batches} micro-batch" + ("es" if micro_batches > 1 else "")
        panel.plot(ratios, measured, "o-", color=colour, label=label)
    ideal = sorted({(p["expert_ms"] / p["attn_ms"], p["ideal_ms"]) for p in points})
    in_turn = sorted({(p["expert_ms"] / p["attn_ms"], p["in_turn_ms"]) for p in points})
    panel.plot(*zip(*ideal, strict=True), "k--", label="ideal: L m max(ta, te)")
    panel.plot(*zip(*in_turn, strict=True), "k:", label="both in turn: L m (ta + te)")
    panel.set_xscale("log", base=2)
    panel.grid(alpha=0.3)
