"""A chart as inline SVG: axes, lines, bars; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 26, 36


def number(value: float) -> str:
    """Short, without trailing zeros."""
    return f"{value:.4g}"


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high."""
    span = max(high - low, 1e-9)
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [step * i for i in range(first, last + 1)]


@dataclass
class Chart:
    """Collects shapes in the coordinates of the data."""

    title: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_name: str = ""
    y_name: str = ""
    height: int = HEIGHT
    shapes: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        """Of the data, in the picture."""
        low, high = self.x_range
        return LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Of the data, in the picture."""
        low, high = self.y_range
        inside = self.height - TOP - BOTTOM
        return TOP + inside - (value - low) / ((high - low) or 1) * inside

    def axes(self, x_ticks: Sequence[float] = (), y_ticks: Sequence[float] = ()) -> None:
        """Grid, numbers and names."""
        base = self.height - BOTTOM
        for value in y_ticks:
            self._segment("grid", LEFT, self.y(value), WIDTH - RIGHT, self.y(value))
            self.text(LEFT - 5, self.y(value) + 3.5, number(value), "tick end")
        for value in x_ticks:
            self._segment("grid", self.x(value), TOP, self.x(value), base)
            self.text(self.x(value), base + 14, number(value), "tick middle")
        if self.x_name:
            self.text((LEFT + WIDTH - RIGHT) / 2, self.height - 6, self.x_name, "tick middle")
        if self.y_name:
            self.text(4, TOP - 11, self.y_name, "tick")

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """Through all points."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.shapes.append(f'<polyline class="line {kind}" points="{path}"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """One point."""
        self.shapes.append(
            f'<circle class="dot {kind}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4.5"/>'
        )

    def level(self, y: float, label: str, *, at_left: bool = False) -> None:
        """A dashed line over the whole width, with its name."""
        self._segment("level", LEFT, self.y(y), WIDTH - RIGHT, self.y(y))
        if at_left:
            self.text(LEFT + 3, self.y(y) - 4, label, "note")
        else:
            self.text(WIDTH - RIGHT - 2, self.y(y) - 4, label, "note end")

    def bar(self, x: tuple[float, float], y: tuple[float, float], kind: str, tip: str = "") -> None:
        """A rectangle."""
        left, right = sorted(map(self.x, x))
        top, bottom = sorted(map(self.y, y))
        about = f"<title>{escape(tip)}</title>" if tip else ""
        self.shapes.append(
            f'<rect class="bar {kind}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
            f'height="{max(bottom - top, 1):.1f}">{about}</rect>'
        )

    def text(self, x: float, y: float, words: str, kind: str) -> None:
        """In picture coordinates."""
        self.shapes.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>')

    def _segment(self, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
        self.shapes.append(
            f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
        )

    def render(self) -> str:
        """The element."""
        label = escape(self.title, quote=True)
        body = "\n".join(self.shapes)
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{label}">\n'
            f"{body}\n</svg>"
        )
