"""Where a measurement comes from: what every benchmark writes beside its numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

COMMIT_VARIABLE = "TEST_COMMIT"  # the commit, where the working tree has no repository


def commit() -> str:
    """Of the working tree, marked where it was changed; "" where nobody knows."""
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip()


def cpu_name() -> str:
    """Of this machine."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
