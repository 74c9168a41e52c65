"""What several tests of the launcher need."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[2] / "support" / "fake_mps_control.py"


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program is on the path, and no daemon runs."""
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable} -SE\n" + FAKE.read_text().partition("\n")[2])
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("FAKE_MPS_DEFAULT", str(tmp_path / "default"))
    return program
