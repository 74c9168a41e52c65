"""The report is one file that loads nothing, and shows the numbers of the search."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from planner_cases import PRIORS, said, site, told

from sglang_afd.planner.__main__ import main
from sglang_afd.planner.answer import answer
from sglang_afd.planner.causes import factors
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.pipeline import Pipeline
from sglang_afd.planner.report import charts
from sglang_afd.planner.report.contents import contents, timeline
from sglang_afd.planner.report.svg import Chart, nice_ticks
from sglang_afd.planner.search import Space

INPUTS = ("--model", "Qwen3-30B-A3B", "--gpu", "H200", "--source", "roofline", "--context", "4096")
VOID = {"meta", "line", "circle", "rect", "polyline"}


class Outline(HTMLParser):
    """Tags that open and close, attributes, and text by tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID or tag == "rect":
            self.open.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def _page(tmp_path: Path, *more: str) -> tuple[str, Outline]:
    path = tmp_path / "report.html"
    assert main(["explain", *INPUTS, *more, "--html", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(text)
    return text, outline


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    text, outline = _page(tmp_path)

    assert outline.open == []
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(", text)
    assert not {name for name, _ in outline.attributes} & {"src", "href", "srcset", "style"}
    assert not re.search(r"https?://(?!127\.0\.0\.1|host-)", text)
    assert len(text) < 200_000


def test_the_page_has_four_pictures_that_say_what_they_are(tmp_path: Path) -> None:
    _, outline = _page(tmp_path)

    labels = [value for name, value in outline.attributes if name == "aria-label"]
    assert len(labels) == len(set(labels)) == 4
    assert outline.texts["figcaption"] == [
        "Speed-up against the ratio",
        "Step time against the ratio",
        "What the speed-up is made of",
        "The first layers of a step",
    ]


def test_the_page_and_the_terminal_show_the_numbers_of_search(tmp_path: Path) -> None:
    text, _ = _page(tmp_path)
    terminal = said("explain", *INPUTS)
    found = told("search", *INPUTS)

    speed_up = found["speed_up"]["total"]
    assert f"<strong>{speed_up:.2f} times</strong>" in text
    assert f"{speed_up:.2f} times the best colocated" in terminal
    for factor in found["speed_up"]["factors"]:
        assert f"{factor['name']} {factor['value']:.3f}" in text
        assert f"x {factor['value']:.3f}" in terminal
    assert f"{found['disaggregated']['tokens_per_s_per_gpu']:.0f} tokens/s per GPU" in text
    assert f"{found['colocated']['step_ms']:.1f} ms" in text


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--max-gpus", "4"), "AFD does not pay"),
        ((), "Uncertain whether AFD pays"),
        (("--gpu", "GB200", "--max-gpus", "36", "--kernels", "fused"), "AFD pays"),
    ],
)
def test_the_headline_is_the_verdict(more: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    _, outline = _page(tmp_path, *more)

    assert outline.texts["h1"] == [expected]


def test_a_models_name_cannot_add_to_the_page(tmp_path: Path) -> None:
    config = (
        '{"_name_or_path": "<script>alert(1)</script>", "num_hidden_layers": 48, "hidden_size": '
        '2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, '
        '"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, '
        '"vocab_size": 151936}'
    )
    (tmp_path / "config.json").write_text(config, encoding="utf-8")

    text, outline = _page(tmp_path, "--model", str(tmp_path))

    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert outline.open == []


def test_the_lines_go_through_the_best_deployment_and_above_no_better_one() -> None:
    where, space = site("Qwen3-235B-A22B-FP8", GPUS["GB200"], 8192), Space(max_gpus=72)

    shown = contents(where, space, answer(PRIORS, where, space))

    assert shown is not None
    best = shown.result.disaggregated
    points = [point for line in shown.lines for point in line.points]
    assert max(map(where.value, points)) == pytest.approx(where.value(best))
    for line in shown.lines:
        assert all(point.deployment.mlp_gpus == line.mlp_gpus for point in line.points)
        counts = [point.deployment.attn_gpus for point in line.points]
        assert counts == sorted(set(counts))


def test_the_bars_of_the_waterfall_go_from_1_to_the_speed_up() -> None:
    where, space = site(), Space(max_gpus=8)
    shown = contents(where, space, answer(PRIORS, where, space))
    assert shown is not None

    picture = charts.waterfall_chart(shown)

    bars = [
        (kind, float(top), float(top) + float(height))
        for kind, top, height in re.findall(
            r'class="bar (\w+)" x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', picture
        )
    ]
    (_, top, base), *steps, (_, last_top, last_base) = bars
    assert [kind for kind, *_ in bars] == ["total", *(kind for kind, *_ in steps), "total"]
    assert (last_base - last_top) / (base - top) == pytest.approx(shown.result.total, rel=0.02)
    level = top
    for (kind, low, high), (_, value, _) in zip(steps, factors(shown.result), strict=True):
        assert kind == ("gain" if value >= 1 else "loss")
        start, stop = (high, low) if value >= 1 else (low, high)
        assert start == pytest.approx(level, abs=1.1)
        level = stop
    assert level == pytest.approx(last_top, abs=1.1)


def test_bars_in_the_terminal_are_as_long_as_their_numbers() -> None:
    shown = said("explain", *INPUTS, "--max-tpot", "20")

    part = shown.split("speed-up against the ratio")[1].split("step time")[0]
    bars = [(len(bar), float(value)) for bar, value in re.findall(r"(#+) ([\d.]+) x", part)]
    assert len(bars) >= 4
    for length, value in bars:
        assert length == pytest.approx(50 * value / max(v for _, v in bars), abs=1)


def test_the_timeline_keeps_stages_apart_and_has_the_pace_of_the_closed_form() -> None:
    where, space = site(), Space(max_gpus=8)
    best = answer(PRIORS, where, space).found.disaggregated.best
    assert best is not None

    busy = timeline(where.scenario, best.deployment)

    count, stages = best.deployment.micro_batches, best.stages
    assert len(busy) == 2 * 3 * count
    for is_attention in (True, False):
        row = sorted(
            (item.start_us, item.stop_us) for item in busy if item.is_attention is is_attention
        )
        assert all(one[1] <= two[0] + 1e-6 for one, two in zip(row, row[1:], strict=False))
    starts = [item.start_us for item in busy if item.is_attention and item.micro_batch == 0]
    pipeline = Pipeline(
        attn_us=stages.attn_us,
        mlp_us=stages.mlp_us,
        exchange_us=stages.exchange_us,
        num_layers=3,
        num_micro_batches=count,
    )
    assert starts[2] - starts[1] == pytest.approx(pipeline.layer_us, rel=0.03)


def test_without_two_sides_there_is_nothing_to_explain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["explain", *INPUTS, "--max-gpus", "1"])

    assert code == 2
    assert "no disaggregated deployment fits on up to 1 GPUs" in capsys.readouterr().err


def test_the_terminal_is_at_most_100_columns_wide() -> None:
    shown = said("explain", *INPUTS, "--max-gpus", "64", "--context-std", "3000")

    assert max(map(len, shown.splitlines())) <= 100
    assert shown.isascii()


@pytest.mark.parametrize(("low", "high"), [(0, 1.2), (0, 17), (0, 1155), (3, 3.01), (0, 72)])
def test_ticks_are_few_and_within_the_axis(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)

    assert 2 <= len(ticks) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def test_a_chart_keeps_what_it_draws_inside_its_frame() -> None:
    chart = Chart(title="t", x_range=(0, 10), y_range=(0, 5))

    assert chart.x(0) < chart.x(10) <= 400
    assert 0 < chart.y(5) < chart.y(0) < chart.height
