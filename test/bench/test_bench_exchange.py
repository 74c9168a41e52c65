"""What of benchmark/bench_exchange.py can be said without a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmark"


@pytest.fixture
def attn_side(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The module, as the program imports it."""
    monkeypatch.syspath_prepend(str(BENCHMARK))
    from exchange import attn_side

    yield attn_side


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    result = subprocess.run(
        [sys.executable, str(BENCHMARK / "bench_exchange.py")],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "bench_exchange needs a CUDA device, and this machine has none\n"


@pytest.mark.parametrize(("dtype", "there"), [("bf16", 4096 + 64), ("fp8", 2048 + 64 + 64)])
def test_a_copy_moves_what_an_exchange_moves(attn_side: object, dtype: str, there: int) -> None:
    case = attn_side.Case(hidden_size=2048, rows=512, dtype=dtype, policy="poll")  # type: ignore[attr-defined]

    assert case.bytes_there == 512 * there
    assert case.bytes_back == 512 * 4096
