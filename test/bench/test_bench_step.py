"""The step benchmark on a tiny model and a CPU: that it measures, compares, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from left_overs import processes_with

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmark" / "bench_step.py"
NUM_LAYERS = 4


def _command(*flags: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--model", "tiny", "--device", "cpu", "--quick", *flags]


def _run(directory: Path, *flags: str, **env: str) -> tuple[int, list[dict[str, Any]], str]:
    done = subprocess.run(
        _command(*flags),
        env=os.environ | {"TMPDIR": str(directory)} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_it_runs_where_nothing_was_installed(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(300)
def test_both_sides_decode_in_turn_with_equal_logits(short_directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"

    code, lines, log = _run(short_directory, "--cases", "32x64,32x40", "--out", str(out))

    assert code == 0, log[-4000:]
    assert [line["case"] for line in lines] == ["32x64", "32x40"]
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    for line in lines:
        assert line["valid"] and line["failures"] == []
        assert line["blocks"] == {"colocated": 2, "afd": 2}
        assert line["colocated_ms"] > 0 and line["afd_ms"] > 0
        assert line["ratio"] == pytest.approx(line["afd_ms"] / line["colocated_ms"], rel=1e-3)
        assert line["mlp"]["decode_runs_per_step"] == NUM_LAYERS
        assert line["mlp"]["decode_rows_per_step"] == NUM_LAYERS * 32
    assert list(short_directory.iterdir()) == []
    assert processes_with(str(short_directory)) == []


@pytest.mark.timeout(300)
def test_other_weights_on_one_side_make_every_line_invalid(short_directory: Path) -> None:
    code, lines, log = _run(short_directory, "--blocks", "1", BENCH_STEP_FAULT="1")

    assert code == 1, log[-4000:]
    assert not lines[0]["logits"]["is_equal_within_bound"]
    assert [reason.split()[1] for reason in lines[0]["invalid_because"]] == ["logits"]


@pytest.mark.timeout(300)
def test_several_servers_share_a_batch_with_rounds_and_without(short_directory: Path) -> None:
    flags = ["--blocks", "1", "--attn", "2", "--mlp", "2", "--also", "--rounds off"]

    code, lines, log = _run(short_directory, *flags)

    assert code == 0, log[-4000:]
    assert [line["rounds"] for line in lines] == ["on", "off"]
    assert lines[0]["colocated_spread"] == lines[1]["colocated_spread"]
    for line in lines:
        assert line["failures"] == []
        assert len(line["afd_peer_ms"]) == 2
        assert line["logits"]["median_relative_of_servers"] == pytest.approx([0, 0], abs=1e-4)
        assert line["mlp"]["decode_run_peers_per_step"] == 2 * NUM_LAYERS
    assert lines[1]["mlp"]["peers_per_decode_run"] == 1.0


@pytest.mark.timeout(300)
def test_a_side_that_does_not_start_is_named_and_the_other_is_measured(
    short_directory: Path,
) -> None:
    code, lines, log = _run(short_directory, "--blocks", "1", "--mlp-flags=--afd-max-rows 7")

    assert code == 1
    assert not lines[0]["valid"]
    assert "attn-0" in lines[0]["invalid_because"][0]
    assert "--afd-max-rows" in log
    assert processes_with(str(short_directory)) == []


@pytest.mark.timeout(300)
def test_a_killed_benchmark_leaves_no_process_behind(short_directory: Path) -> None:
    process = subprocess.Popen(
        _command("--blocks", "50"),
        env=os.environ | {"TMPDIR": str(short_directory)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 120
    while not list(short_directory.glob("*/*-mlp-0.log")) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert len(processes_with(str(short_directory))) > 2

    process.kill()
    process.wait(60)

    deadline_s = time.monotonic() + 60
    while processes_with(str(short_directory)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert processes_with(str(short_directory)) == []
