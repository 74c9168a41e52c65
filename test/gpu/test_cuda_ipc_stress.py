"""Thousands of exchanges of random sizes between three processes, for each way to wait."""

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

NUM_RANKS = 2
TIMEOUT_S = 200
LIMIT_S = 180  # of a process, which then says where it hangs
PROGRAM = Path(__file__).parents[1] / "support" / "stress_exchange.py"
pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)

Lines = dict[tuple[str, str], dict[str, object]]  # by side and session


def _start(environment: Mapping[str, str], *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *argv, "--limit", str(LIMIT_S)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module", params=[20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def number(request: pytest.FixtureRequest) -> int:
    """Of exchanges for each policy; about a sixth of a millisecond each, most of it the host's."""
    return int(request.param)


@pytest.fixture(scope="module")
def lines(mps: Mapping[str, str], number: int) -> Lines:
    """What all sides say of every session."""
    if not mps:
        pytest.skip("needs MPS: without it each flag between processes takes milliseconds")
    root = PROGRAM.parents[2]
    path = os.pathsep.join([str(root), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **mps, "PYTHONPATH": path}
    every = [_start(environment, "mlp", "--rank", str(rank)) for rank in range(NUM_RANKS)]
    timer = threading.Timer(TIMEOUT_S, lambda: [process.kill() for process in every])
    timer.start()
    try:
        addresses = [_address_of(rank) for rank in every]
        every.append(_start(environment, "attn", *addresses, "--exchanges", str(number)))
        # One that fails would leave the others waiting for it.
        while any(process.poll() is None for process in every):
            if any(process.poll() for process in every):
                break
            time.sleep(0.1)
    finally:
        timer.cancel()
        for process in every:
            process.kill()
        said = "".join(process.communicate()[0] for process in every)
    assert [process.returncode for process in every] == [0] * len(every), said
    parsed = [json.loads(line) for line in said.splitlines()]
    return {(str(line["side"]), str(line["session"])): line for line in parsed}


def _address_of(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    assert line, f"a rank ended with {rank.wait()} before it listened; see above"
    return str(json.loads(line)["address"])


@pytest.mark.parametrize("policy", ["poll", "memop"])
def test_every_value_of_every_exchange_is_right(lines: Lines, number: int, policy: str) -> None:
    attn = lines["attn", f"{policy}.none"]

    assert attn["wrong_values"] == 0, attn
    assert int(str(attn["num_exchanges"])) >= number
    gpu_report.record(f"{number} exchanges, {policy}", attn)


@pytest.mark.parametrize("policy", ["poll", "memop"])
def test_ranks_count_each_choice_once(lines: Lines, policy: str) -> None:
    ranks = [lines[f"mlp-{rank}", f"{policy}.none"] for rank in range(NUM_RANKS)]

    counted = sum(int(str(line["num_choices"])) for line in ranks)

    assert counted == lines["attn", f"{policy}.none"]["num_choices"]
    assert [line["error"] for line in ranks] == [None] * NUM_RANKS


@pytest.mark.parametrize("fault", ["shifted", "other_share", "reversed"])
def test_a_rank_that_mixes_up_rows_is_noticed(lines: Lines, fault: str) -> None:
    assert int(str(lines["attn", f"poll.{fault}"]["wrong_values"])) > 0
