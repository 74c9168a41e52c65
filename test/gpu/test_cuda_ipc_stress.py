"""Thousands of exchanges of random sizes between two processes, for each way to wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import gpu_report
import pytest

NUM_EXCHANGES = 100_000
TIMEOUT_S = 240
PROGRAM = Path(__file__).parents[1] / "support" / "stress_exchange.py"
pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)

Lines = dict[tuple[str, str], dict[str, object]]  # by side and session


def _start(environment: Mapping[str, str], *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *argv],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module", params=[20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def number(request: pytest.FixtureRequest) -> int:
    """Of exchanges; about a quarter of a millisecond each, most of it the host's."""
    return int(request.param)


@pytest.fixture(scope="module")
def lines(mps: Mapping[str, str], number: int) -> Lines:
    """What both sides say of every session."""
    if not mps:
        pytest.skip("needs MPS: without it each flag between processes takes milliseconds")
    root = PROGRAM.parents[2]
    path = os.pathsep.join([str(root), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **mps, "PYTHONPATH": path}
    mlp = _start(environment, "mlp")
    both = [mlp]
    timer = threading.Timer(TIMEOUT_S, lambda: [process.kill() for process in both])
    timer.start()
    try:
        assert mlp.stdout is not None
        addresses = json.loads(mlp.stdout.readline())["addresses"]
        both.append(_start(environment, "attn", *addresses, "--exchanges", str(number)))
        # One that fails would leave the other waiting for it.
        while any(process.poll() is None for process in both):
            if any(process.poll() for process in both):
                break
            time.sleep(0.1)
    finally:
        timer.cancel()
        for process in both:
            process.kill()
        said = "".join(process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0], said
    parsed = [json.loads(line) for line in said.splitlines()]
    return {(str(line["side"]), str(line["session"])): line for line in parsed}


@pytest.mark.parametrize("policy", ["poll", "memop"])
def test_every_value_of_every_exchange_is_right(lines: Lines, number: int, policy: str) -> None:
    attn = lines["attn", f"{policy}.none"]

    assert attn["wrong_values"] == 0, attn
    assert int(str(attn["num_exchanges"])) >= number
    gpu_report.record(f"{number} exchanges, {policy}", attn)


@pytest.mark.parametrize("policy", ["poll", "memop"])
def test_ranks_count_each_choice_once(lines: Lines, policy: str) -> None:
    ranks = [lines[f"mlp-{rank}", f"{policy}.none"] for rank in range(2)]

    counted = sum(int(str(line["num_choices"])) for line in ranks)

    assert counted == lines["attn", f"{policy}.none"]["num_choices"]
    assert [line["error"] for line in ranks] == [None, None]


@pytest.mark.parametrize("fault", ["shifted", "other_share", "reversed"])
def test_a_rank_that_mixes_up_rows_is_noticed(lines: Lines, fault: str) -> None:
    assert int(str(lines["attn", f"poll.{fault}"]["wrong_values"])) > 0
