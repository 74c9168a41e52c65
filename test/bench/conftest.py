"""What several tests of benchmarks need."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """For the benchmark's files; a socket's path is at most 107 bytes long."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        yield Path(directory)
