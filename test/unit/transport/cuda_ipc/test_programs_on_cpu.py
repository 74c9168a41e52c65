"""Programs that hold a GPU run from end to end without one, so that their mistakes cost nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
RUNNER = ROOT / "test" / "support" / "program_on_cpu.py"
SANITIZED = ROOT / "test" / "gpu" / "sanitized_exchange.py"
STRESS = ROOT / "test" / "support" / "stress_exchange.py"
BENCH = ROOT / "benchmark" / "bench_exchange.py"
TINY = ("--layers", "2", "--hidden", "256", "--rows", "3", "--steps", "1")
TIMEOUT_S = 240
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(TIMEOUT_S + 30),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++ to compile exchange.cu"),
]


def _command(program: Path, *argv: str) -> list[str]:
    return [sys.executable, str(RUNNER), str(program), *argv]


def _run(program: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(program, *argv),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _bench(tmp_path: Path, plant: str = "") -> subprocess.CompletedProcess[str]:
    """With a GPU, as far as nvidia-smi knows."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho GPU 0: none\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    return _run(BENCH, *TINY, "--out", str(tmp_path / "lines"), PATH=path, PLANT=plant)


def test_the_exchanges_for_compute_sanitizer_are_right() -> None:
    done = _run(SANITIZED)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "attached anew: right"
    assert all(line.endswith(": right") for line in lines)


@contextmanager
def _ranks() -> Iterator[list[subprocess.Popen[str]]]:
    started = [
        subprocess.Popen(
            _command(STRESS, "mlp", "--rank", str(rank)), stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        yield started
    finally:
        for rank in started:
            rank.kill()
            rank.communicate()


def _parsed(text: str) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_stress_run_counts_what_is_wrong_and_what_each_rank_did() -> None:
    with _ranks() as ranks:
        addresses = [json.loads(rank.stdout.readline())["address"] for rank in ranks]  # type: ignore[union-attr]

        done = _run(STRESS, "attn", *addresses, "--exchanges", "12", "--faulty-exchanges", "6")

        said = [_parsed(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert done.returncode == 0, done.stderr
    attn = {line["session"]: line for line in _parsed(done.stdout)}
    is_wrong = {session: line["wrong_values"] > 0 for session, line in attn.items()}
    faults = ("poll.shifted", "poll.other_share", "poll.reversed")
    assert is_wrong == {"poll.none": False, "memop.none": False} | dict.fromkeys(faults, True)
    for number, session in enumerate(attn):
        counted = sum(lines[number]["num_choices"] for lines in said)
        assert counted == attn[session]["num_choices"]


def test_the_benchmark_measures_every_case_and_keeps_its_lines(tmp_path: Path) -> None:
    done = _bench(tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lines").read_text() == done.stdout
    lines = _parsed(done.stdout)
    assert [line["case"] for line in lines] == [
        f"256x3-{dtype}-{policy}" for policy in ("poll", "memop") for dtype in ("bf16", "fp8")
    ]
    times = ("exchange_us", "copy_us", "flag_round_trip_us", "one_way_us", "back_us")
    assert all(line[name] > 0 for line in lines for name in times)
    assert all("ratio" in line for line in lines)


_RETURNS_OTHER_ROWS = """
from exchange.mlp_side import MlpSide
from sglang_afd.transport.cuda_ipc.units import UnitExchange
push = UnitExchange.push
def push_other(self, partial, bucket):
    if bucket > 1 and self.hidden_states.data_ptr() == partial.data_ptr():
        partial = partial.roll(1, 0)
    push(self, partial, bucket)
UnitExchange.push = push_other
"""
_ENDS_EARLY = """
from exchange.mlp_side import MlpSide
def fail(*arguments, **more):
    raise RuntimeError("planted in the MLP process")
MlpSide._serve = fail
"""


@pytest.mark.parametrize(
    ("plant", "said"),
    [(_RETURNS_OTHER_ROWS, "other rows came back"), (_ENDS_EARLY, "planted in the MLP process")],
)
def test_the_benchmark_says_what_went_wrong_on_either_side(
    tmp_path: Path, plant: str, said: str
) -> None:
    done = _bench(tmp_path, plant)

    assert done.returncode == 1
    assert said in done.stderr
    assert done.stdout == ""
