"""The four pictures of a report."""

from __future__ import annotations

from collections.abc import Callable

from sglang_afd.planner.causes import factors
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.report.contents import Contents
from sglang_afd.planner.report.svg import LEFT, RIGHT, TOP, WIDTH, Chart, nice_ticks

_ROW = 30


def speed_up_chart(shown: Contents) -> str:
    """Tokens/s per GPU over the best colocated deployment, by ratio."""
    base = shown.result.colocated.tokens_per_s_per_gpu
    return _over_ratio(
        shown,
        "Speed-up against the ratio of attention to MLP GPUs",
        lambda point: point.tokens_per_s_per_gpu / base,
        "speed-up",
        [(1.0, "best colocated")],
    )


def step_chart(shown: Contents) -> str:
    """Time of a step, by ratio."""
    levels = [(shown.result.colocated.step_us / 1000, "best colocated")]
    workload = shown.site.scenario.workload
    if workload.max_tpot_us is not None:
        limit = workload.max_tpot_us * workload.accepted_tokens / 1000
        levels.append((limit, "limit"))
    return _over_ratio(
        shown,
        "Step time against the ratio of attention to MLP GPUs",
        lambda point: point.step_us / 1000,
        "ms a step",
        levels,
    )


def _over_ratio(
    shown: Contents,
    title: str,
    value: Callable[[Prediction], float],
    name: str,
    levels: list[tuple[float, str]],
) -> str:
    points = [
        (line, point.deployment.attn_gpus / line.mlp_gpus, value(point))
        for line in shown.lines
        for point in line.points
    ]
    highest = max([y for *_, y in points] + [y for y, _ in levels]) * 1.12
    widest = max(x for _, x, _ in points)
    chart = Chart(
        title=title,
        x_range=(0, widest * 1.02),
        y_range=(0, highest),
        x_name="attention GPUs for each MLP GPU",
        y_name=name,
    )
    chart.axes(nice_ticks(0, widest), nice_ticks(0, highest))
    for index, (y, label) in enumerate(levels):
        chart.level(y, label, at_left=index > 0)
    for index, line in enumerate(shown.lines):
        series = [(x, y) for of, x, y in points if of is line]
        chart.line(series, f"series{index}")
        chart.text(
            WIDTH - RIGHT - 88 * (len(shown.lines) - index) + 10,
            TOP - 11,
            f"{line.mlp_gpus} MLP GPU{'s' if line.mlp_gpus > 1 else ''}",
            f"legend series{index}",
        )
    best = shown.result.disaggregated
    chart.dot(best.deployment.attn_gpus / best.deployment.mlp_gpus, value(best), "best")
    return chart.render()


def waterfall_chart(shown: Contents) -> str:
    """From 1 to the speed-up, factor by factor."""
    steps = factors(shown.result)
    levels = [1.0]
    for _, value, _ in steps:
        levels.append(levels[-1] * value)
    highest = max(levels) * 1.15
    chart = Chart(title="The three factors of the speed-up", x_range=(0, 5), y_range=(0, highest))
    chart.axes((), nice_ticks(0, highest))
    bars = [("colocated", 0.0, 1.0, "total", "1")]
    for (name, value, _), before, after in zip(steps, levels, levels[1:], strict=False):
        kind = "gain" if after >= before else "loss"
        bars.append((name, before, after, kind, f"x {value:.2f}"))
    bars.append(("AFD", 0.0, levels[-1], "total", f"{levels[-1]:.2f}"))
    for index, (name, low, high, kind, label) in enumerate(bars):
        middle = chart.x(index + 0.5)
        chart.bar((index + 0.14, index + 0.86), (low, high), kind)
        chart.text(middle, chart.y(max(low, high)) - 5, label, "value middle")
        for row, word in enumerate(name.replace("disaggregation", "disagg.").split()):
            chart.text(middle, chart.height - 22 + 12 * row, word, "tick middle")
    return chart.render()


def timeline_chart(shown: Contents) -> str:
    """Who works on which micro-batch in the first layers of a step."""
    end = max(busy.stop_us for busy in shown.timeline)
    chart = Chart(
        title="The first layers of a step",
        x_range=(0, end),
        y_range=(0, 2),
        x_name="us since the step began",
        height=TOP + 2 * _ROW + 56,
    )
    chart.axes(nice_ticks(0, end), ())
    for busy in shown.timeline:
        row = 1 if busy.is_attention else 0
        role = "attention" if busy.is_attention else "MLP"
        tip = (
            f"{role}, layer {busy.layer + 1}, micro-batch {busy.micro_batch + 1}: "
            f"{busy.start_us:.0f} to {busy.stop_us:.0f} us"
        )
        chart.bar(
            (busy.start_us, busy.stop_us),
            (row + 0.12, row + 0.88),
            f"micro{busy.micro_batch}",
            tip,
        )
        if busy.stop_us - busy.start_us > end / 18:
            middle = chart.x((busy.start_us + busy.stop_us) / 2)
            words = f"{busy.layer + 1}{'abcd'[busy.micro_batch]}"
            chart.text(middle, chart.y(row + 0.5) + 4, words, "inside middle")
    for row, name in ((1, "attn"), (0, "MLP")):
        chart.text(LEFT - 5, chart.y(row + 0.5) + 4, name, "tick end")
    count = shown.result.disaggregated.deployment.micro_batches
    named = f"number: layer; letter: micro-batch, of {count}"
    chart.text(LEFT, TOP - 11, named, "tick")
    return chart.render()
