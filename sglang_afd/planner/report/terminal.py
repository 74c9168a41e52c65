"""The report for a terminal of 100 columns, in plain characters."""

from __future__ import annotations

from collections.abc import Callable

from sglang_afd.planner.causes import describe_binding, factors
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.report.contents import Contents

_BAR = 50
_ROWS = 14
_COLUMNS = 84


def terminal_lines(shown: Contents) -> list[str]:
    """Below the verdict: the same four pictures."""
    base, best = shown.result.colocated, shown.result.disaggregated
    line = next(line for line in shown.lines if line.mlp_gpus == best.deployment.mlp_gpus)
    points = _thinned(line.points, best)
    gained = _speed_up_over(base)
    most = max(1.0, *map(gained, points))
    lines = ["speed-up against the ratio", *_bars(points, best, gained, most, "x")]
    lines += [f"  {'colocated':>11}  {_bar(1.0, most)} 1.00 x"]
    lines += ["", "step time against the ratio"]
    longest = max(point.step_us for point in points) / 1000
    lines += _bars(points, best, lambda point: point.step_us / 1000, longest, "ms")
    lines += ["", "what the speed-up is made of", f"  {'colocated':<20} 1.000"]
    level = 1.0
    for name, value, _ in factors(shown.result):
        level *= value
        lines.append(f"  {name:<20} x {value:.3f}  = {level:.3f}")
    lines += ["", "the first layers of a step (number: layer, letter: micro-batch)"]
    lines += _timeline(shown)
    return [*lines, f"  waits for {describe_binding(best)}"]


def _speed_up_over(base: Prediction) -> Callable[[Prediction], float]:
    return lambda point: point.tokens_per_s_per_gpu / base.tokens_per_s_per_gpu


def _thinned(points: tuple[Prediction, ...], best: Prediction) -> list[Prediction]:
    step = -(-len(points) // _ROWS)
    keep = [
        point
        for index, point in enumerate(points)
        if index % step == 0 or point.deployment.attn_gpus == best.deployment.attn_gpus
    ]
    return keep


def _bar(value: float, most: float) -> str:
    return "#" * round(_BAR * min(value / max(most, 1e-9), 1.0))


def _bars(
    points: list[Prediction],
    best: Prediction,
    value: Callable[[Prediction], float],
    most: float,
    unit: str,
) -> list[str]:
    lines = []
    for point in points:
        deployment = point.deployment
        is_best = deployment.attn_gpus == best.deployment.attn_gpus
        mark = " <- best" if is_best else ""
        name = f"{deployment.attn_gpus}A:{deployment.mlp_gpus}F"
        lines.append(f"  {name:>11}  {_bar(value(point), most)} {value(point):.2f} {unit}{mark}")
    return lines


def _timeline(shown: Contents) -> list[str]:
    end = max(busy.stop_us for busy in shown.timeline)
    rows = {True: [" "] * _COLUMNS, False: [" "] * _COLUMNS}
    for busy in shown.timeline:
        start, stop = (round(time / end * (_COLUMNS - 1)) for time in (busy.start_us, busy.stop_us))
        label = f"{busy.layer + 1}{'abcd'[busy.micro_batch]}"
        width = max(stop - start, 1)
        block = label[:width] + ("=" * (width - len(label)) if width > len(label) else "")
        rows[busy.is_attention][start : start + width] = list(block)
    return [
        f"  {name:<9} |{''.join(rows[key])}|" for name, key in (("attention", True), ("MLP", False))
    ] + [f"  {'':<9}  0{end:>{_COLUMNS - 4}.0f} us"]
