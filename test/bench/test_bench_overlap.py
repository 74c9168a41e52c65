"""The overlap benchmark on few steps: what it reports and counts, never how fast that was."""

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
SCRIPT = ROOT / "benchmark" / "bench_overlap.py"
NUM_LAYERS, BATCH, TOKENS = 8, 4, 5  # of --quick
PROMPT_ROWS = 2 * BATCH


def _command(*flags: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--quick", *flags]


def _left_over(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.mark.timeout(600)
def test_counters_prove_that_no_delay_was_skipped(short_directory: Path, tmp_path: Path) -> None:
    plot = tmp_path / "sweep.png"

    done = subprocess.run(
        _command("--plot", str(plot)),
        env=os.environ | {"TMPDIR": str(short_directory)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["faults"] == []
    for key in (
        "two_micro_batches_over_one",
        "four_peers_efficiency",
        "four_peers_efficiency_fcfs",
    ):
        assert report[key] > 0
    _check_split(report["overlap"])
    _check_rounds(report["four_peers_efficiency_runs"])
    assert {point["micro_batches"] for point in report["sweep"]} == {1, 2}
    assert all(point["expert_runs"] and point["rows"] for point in report["sweep"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert _left_over(short_directory) == []


def _check_split(overlap: dict[str, Any]) -> None:
    (one,), (two,) = overlap["one"]["counts"], overlap["two"]["counts"]
    (steps,) = one["decode_steps"]
    assert steps in (TOKENS - 1, TOKENS)
    assert one["rows"] == NUM_LAYERS * (PROMPT_ROWS + steps * BATCH)
    assert two["exchanges"] - one["exchanges"] >= NUM_LAYERS * (TOKENS - 2)


def _check_rounds(runs: dict[str, Any]) -> None:
    (one,), (four,) = runs["one"]["counts"], runs["four"]["counts"]
    assert one["peers_per_run"] == 1
    assert len(four["decode_steps"]) == 4
    assert four["expert_runs"] < four["exchanges"]


@pytest.mark.timeout(300)
def test_a_skipped_delay_is_reported(short_directory: Path) -> None:
    done = subprocess.run(
        _command("--cases", "overlap"),
        env=os.environ | {"TMPDIR": str(short_directory), "BENCH_OVERLAP_SKIP": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    faults = json.loads(done.stdout.splitlines()[-1])["faults"]
    assert any("delayed runs" in fault for fault in faults), faults


@pytest.mark.timeout(300)
def test_a_killed_benchmark_leaves_nothing_behind(short_directory: Path) -> None:
    process = subprocess.Popen(
        _command("--cases", "overlap"),
        env=os.environ | {"TMPDIR": str(short_directory)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 120
    while len(list(short_directory.glob("*/*.delays"))) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert len(processes_with(str(short_directory))) > 3

    process.kill()
    process.wait(60)

    deadline_s = time.monotonic() + 60
    while processes_with(str(short_directory)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert processes_with(str(short_directory)) == []
    assert _left_over(short_directory) == []
