"""The router benchmark on this project's router alone: that it measures, and notices a loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmark" / "bench_router.py"


def _run(*flags: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--blocks", "1", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.timeout(120)
def test_this_projects_router_is_measured_and_a_missing_one_is_named() -> None:
    code, line, log = _run("--others-python", sys.executable, "--only", "sgl_router_afd")

    assert code == 0, log[-4000:]
    assert line["tokens_lost"] == 0 and line["failures"] == []
    assert set(line["missing"]) <= {"sglang-router", "smg"}
    for key in ("ttft_added_ms", "cpu_us_per_chunk", "cpu_us_per_request"):
        assert list(line[key]) == ["sgl_router_afd"]
    assert line["cpu_us_per_chunk"]["sgl_router_afd"] > 0
    assert line["cpu_us_per_request"]["sgl_router_afd"] > 0
    for case in ("streams_1", "streams_32", "streams_256", "short_32"):
        assert line["cases"][case]["sgl_router_afd"]["samples"] > 0


@pytest.mark.timeout(120)
def test_a_lost_token_makes_the_run_fail() -> None:
    code, line, log = _run("--only", "sgl_router_afd", "--server-flags=--lose-a-token")

    assert code == 1, log[-4000:]
    assert line["tokens_lost"] > 0
    assert any("tokens were lost" in failure for failure in line["failures"])
