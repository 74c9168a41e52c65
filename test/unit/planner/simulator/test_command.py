"""`python -m sglang_afd.planner simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_afd.planner.__main__ import main

DEPLOYMENT = (
    *("simulate", "--model", "Qwen3-30B-A3B", "--gpu", "H200", "--context", "4096"),
    *("--attn-gpus", "3", "--mlp-gpus", "1", "--batch", "32", "--steps", "3"),
)
TIMELINES = sorted(
    str(path)
    for path in (Path(__file__).parents[4] / "benchmark" / "planner" / "timelines" / "3a2f").glob(
        "*.gz"
    )
)


def _json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, dict[str, float]]:
    assert main([*flags, "--json"]) == 0
    answer: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)
    return answer


def test_it_reads_the_inputs_of_predict_and_meets_its_closed_form(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = _json(capsys, *DEPLOYMENT)

    predicted = answer["prediction"]["tokens_per_s_per_gpu"]
    assert answer["simulation"]["tokens_per_s_per_gpu"] == pytest.approx(predicted, rel=1e-6)


def test_noise_and_failures_make_it_slower(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--noise", "typical", "--prefill-per-step", "0.1", "--fail", "mlp:0:0@60+40")

    answer = _json(capsys, *DEPLOYMENT, *flags)

    simulated = answer["simulation"]["tokens_per_s_per_gpu"]
    assert simulated < 0.9 * answer["prediction"]["tokens_per_s_per_gpu"]


def test_the_text_says_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEPLOYMENT, "--noise", "typical"]) == 0

    text = capsys.readouterr().out
    assert "waits for rows of a slower peer" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_timeline_is_written_for_perfetto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"

    assert main([*DEPLOYMENT, "--timeline", str(file)]) == 0

    events = json.loads(file.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"attn 0", "attn 1", "attn 2", "mlp 0"}
    assert sum(event["name"] == "attention" for event in events) == 3 * 48 * 2


def test_a_recorded_timeline_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    answer = _json(capsys, "simulate", "--skip-steps", "9", "--replay", *TIMELINES)

    assert abs(answer["as_recorded"]["mean_pct"]) < 3
    assert abs(answer["means"]["mean_pct"]) < 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--noise", "loud"), "--noise loud: wanted one of none, typical"),
        (("--fail", "mlp:0@1"), "--fail mlp:0@1: wanted ROLE:GROUP:INDEX@MS"),
        (("--fail", "mlp:0:0@1.2.3"), "--fail mlp:0:0@1.2.3: wanted ROLE:GROUP:INDEX@MS"),
        (("--steps", "9" * 25), "num_steps is 9999999999999999999999999, which would never end"),
        (("--warm-steps", "9" * 25), "which would never end; wanted at most 1000000"),
        (("--instances", "9" * 25), "which would never end; wanted at most 10000"),
        (("--fail", "mlp:0:7@1"), "it has 1"),
        (("--rounds", "maybe"), "wanted on or off"),
        (("--prefill-tokens", "9"), "wanted LOW-HIGH"),
        (("--attn-jitter", "5"), "5 % is 0.05"),
        (("--steps", "0"), "above 0"),
        (
            ("--mode", "colocated", "--attn-gpus", "4", "--mlp-gpus", "0"),
            "only a disaggregated deployment",
        ),
    ],
    ids=str,
)
def test_bad_flags_are_refused(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DEPLOYMENT, *flags]) == 2

    assert says in capsys.readouterr().err
