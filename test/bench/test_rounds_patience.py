"""The sweep of what patience learns from, on a few of its cells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmark" / "rounds_patience.py"


def test_the_sweep_prints_its_tables_and_no_cell_is_worth_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--steps", "10", "--seeds", "1"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    tables = [text.splitlines() for text in done.stdout.split("\n\n")[:-1]]
    heads = [table[0].split(" | ")[0] for table in tables]
    assert heads == ["| layer_ms", "| peers", "| ratio", "| jitter", "| hangs"]
    # Columns: two names, cells, mean and worst share of the ideal before, the same after.
    shares = [float(row.split(" | ")[5]) for table in tables for row in table[2:]]
    assert shares and all(0.2 < share < 1.05 for share in shares)
