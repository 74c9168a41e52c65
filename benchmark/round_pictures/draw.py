"""Draws recordings: a lane for each attention server, and one for each MLP rank below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from round_pictures.recording import Mark, Run
from round_pictures.scenes import Panel, Picture

STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sglang-afd",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 8,
    "hatch.linewidth": 0.5,
}
PEERS = {"a": "#1f5fa8", "b": "#b35900", "c": "#2e7d32", "d": "#8e3a80", "p": "#a02c3c"}
RESTS = {
    "step": ("#e4e7eb", "", "in a step, waiting for replies"),
    "hang": ("#ffffff", "////", "hangs"),
    "window": ("#d6c4ec", "", "gathering window"),
    "member wait": ("#f7d3cb", "", "waits for a member's rows"),
    "order wait": ("#c9e2ea", "", "waits for rank 0's word"),
}
MARKS = {
    "intent": ("v", "#333333", "#333333", "announces a decode step"),
    "prefill intent": ("v", "#333333", "#ffffff", "announces a prefill"),
    "withdrawal": ("^", "#333333", "#ffffff", "no step is to come"),
    "death": ("X", "#c00000", "#c00000", "dies"),
}
LANE_IN, WIDTH_IN = 0.36, 10.0
TEXT_MS = 0.012  # share of the width that a label needs


def draw(picture: Picture, out: Path) -> None:
    """Write one SVG; the same picture is the same file."""
    with pyplot.rc_context(STYLE):
        heights = [len(_lanes(panel)) * LANE_IN + 0.35 for panel in picture.panels]
        figure, all_axes = pyplot.subplots(
            len(picture.panels),
            figsize=(WIDTH_IN, sum(heights) + 0.75),
            gridspec_kw={"height_ratios": heights},
            squeeze=False,
            layout="constrained",
        )
        for panel, axes in zip(picture.panels, all_axes[:, 0], strict=True):
            _draw_panel(axes, panel, has_arrows=picture.has_arrows)
        all_axes[-1, 0].set_xlabel("ms")
        figure.legend(
            handles=list(_legend(picture)), loc="outside lower center", ncols=5, frameon=False
        )
        metadata = {"Date": None, "Creator": None, "Description": picture.told}
        figure.savefig(out, metadata=metadata)
        pyplot.close(figure)
    lines = (line.rstrip() for line in out.read_text().splitlines())
    out.write_text("\n".join(lines) + "\n")


def _lanes(panel: Panel) -> list[str]:
    peers = sorted({bar.lane for bar in panel.recording.bars if not bar.lane.startswith("MLP")})
    ranks = sorted({run.rank for run in panel.recording.runs})
    return [*peers, *(f"MLP rank {rank}" for rank in ranks)]


def _draw_panel(axes: Axes, panel: Panel, *, has_arrows: bool) -> None:
    lanes = _lanes(panel)
    rows = {lane: len(lanes) - 1 - index for index, lane in enumerate(lanes)}
    width_ms = panel.end_ms - panel.begin_ms
    axes.set_xlim(0, width_ms)
    axes.set_ylim(-0.65, len(lanes) - 0.45)
    axes.set_yticks([rows[lane] for lane in lanes], lanes)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if panel.title:
        axes.set_title(panel.title, loc="left", fontsize=9)
    _draw_bars(axes, panel, rows)
    for run in panel.recording.runs:
        if run.end_ms > panel.begin_ms and run.begin_ms < panel.end_ms:
            _draw_run(axes, panel, run, rows)
    for mark in panel.recording.marks:
        if panel.begin_ms <= mark.at_ms <= panel.end_ms:
            shape, edge, face, _ = MARKS[mark.kind]
            size = 8 if mark.kind == "death" else 4.5
            axes.plot(
                mark.at_ms - panel.begin_ms,
                rows[mark.lane] + (0 if mark.kind == "death" else 0.42),
                shape,
                color=edge,
                markerfacecolor=face,
                markersize=size,
                markeredgewidth=0.7,
                clip_on=False,
                zorder=5,
            )
    if has_arrows:
        _draw_arrows(axes, panel, rows)


def _draw_bars(axes: Axes, panel: Panel, rows: dict[str, int]) -> None:
    width_ms = panel.end_ms - panel.begin_ms
    order = {"step": 0}
    for bar in sorted(panel.recording.bars, key=lambda bar: order.get(bar.kind, 1)):
        begin_ms = max(bar.begin_ms - panel.begin_ms, 0.0)
        end_ms = min(bar.end_ms - panel.begin_ms, width_ms)
        if end_ms <= begin_ms:
            continue
        is_rest = bar.kind in RESTS
        is_prefill = bar.kind == "prefill attention"
        color, hatch = RESTS[bar.kind][:2] if is_rest else (PEERS[bar.lane], "")
        axes.barh(
            rows[bar.lane],
            end_ms - begin_ms,
            left=begin_ms,
            height=0.62,
            color=color,
            alpha=0.4 if is_prefill else 1.0,
            hatch=hatch,
            edgecolor="#888888" if bar.kind == "hang" else "white",
            linewidth=0.4,
        )
        if bar.label and end_ms - begin_ms > TEXT_MS * len(bar.label) * width_ms:
            axes.text(
                (begin_ms + end_ms) / 2,
                rows[bar.lane] - 0.02,
                bar.label,
                ha="center",
                va="center",
                color="black" if is_prefill else "white",
                fontsize=7,
            )


def _draw_run(axes: Axes, panel: Panel, run: Run, rows: dict[str, int]) -> None:
    """A unit: a stripe for each peer that it could have, in that peer's colour if it has it."""
    peers = [lane for lane in rows if not lane.startswith("MLP")]
    width_ms = panel.end_ms - panel.begin_ms
    begin_ms = max(run.begin_ms - panel.begin_ms, 0.0)
    end_ms = min(run.end_ms - panel.begin_ms, width_ms)
    row, height = rows[f"MLP rank {run.rank}"], 0.62 / len(peers)
    place = {"left": begin_ms, "linewidth": 0.4}
    axes.barh(row, end_ms - begin_ms, height=0.62, color="white", **place)
    for index, peer in enumerate(peers):
        if peer in run.peers:
            y = row + 0.31 - height * (index + 0.5)
            color = PEERS[peer]
            alpha = 0.4 if run.unit.is_prefill else 1.0
            axes.barh(y, end_ms - begin_ms, height=height, color=color, alpha=alpha, **place)
    axes.barh(row, end_ms - begin_ms, height=0.64, fill=False, edgecolor="#444444", **place)
    label = _label(run, panel)
    if end_ms - begin_ms > 0.008 * len(label) * width_ms:
        middle_ms = (begin_ms + end_ms) / 2
        axes.text(middle_ms, row - 0.46, label, ha="center", va="center", fontsize=6.5)


def _label(run: Run, panel: Panel) -> str:
    unit = run.unit
    if unit.is_prefill:
        return f"{unit.num_rows}"
    if panel.has_sequence:
        return f"#{unit.sequence}"
    has_parts = any(other.unit.micro_batch_id for other in panel.recording.runs)
    return f"{unit.layer_id}" + ("ABCD"[unit.micro_batch_id] if has_parts else "")


def _draw_arrows(axes: Axes, panel: Panel, rows: dict[str, int]) -> None:
    """From each run to the attention that its reply let begin, and from attention to its run."""
    attention = {
        (bar.lane, bar.label): bar for bar in panel.recording.bars if bar.kind == "attention"
    }
    for run in panel.recording.runs:
        row = rows[f"MLP rank {run.rank}"]
        for peer in run.peers:
            part = "ABCD"[run.unit.micro_batch_id]
            sent = attention[peer, f"{run.unit.layer_id}{part}"]
            _arrow(axes, (sent.end_ms, rows[peer] - 0.31), (run.begin_ms, row + 0.31), peer)
            then = attention.get((peer, f"{run.unit.layer_id + 1}{part}"))
            if then is not None:
                _arrow(axes, (run.end_ms, row + 0.31), (then.begin_ms, rows[peer] - 0.31), peer)


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], peer: str) -> None:
    style = {"arrowstyle": "->", "color": PEERS[peer], "linewidth": 0.8, "alpha": 0.8}
    axes.annotate("", xy=end, xytext=begin, arrowprops=style)


def _legend(picture: Picture) -> Iterator[Patch | Line2D]:
    yield Patch(facecolor="#888888", label="attention; expert run (MLP)")
    recordings = [panel.recording for panel in picture.panels]
    kinds = {bar.kind for recording in recordings for bar in recording.bars}
    if "prefill attention" in kinds:
        yield Patch(facecolor="#888888", alpha=0.4, label="the same of a prefill (with rows)")
    for kind, (color, hatch, label) in RESTS.items():
        if kind in kinds:
            yield Patch(facecolor=color, hatch=hatch, edgecolor="#888888", lw=0.4, label=label)
    marks = {mark.kind for mark in _shown_marks(picture.panels)}
    for kind, (shape, edge, face, label) in MARKS.items():
        if kind in marks:
            yield Line2D(
                [], [], marker=shape, color=edge, markerfacecolor=face, linestyle="", label=label
            )


def _shown_marks(panels: Sequence[Panel]) -> Iterator[Mark]:
    for panel in panels:
        for mark in panel.recording.marks:
            if panel.begin_ms <= mark.at_ms <= panel.end_ms:
                yield mark
