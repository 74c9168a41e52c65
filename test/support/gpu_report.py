"""Raw numbers of a run of the GPU tests, as docs/results/ wants them.

Written to gpu_suite.json in the directory that OUT names, whenever something is added, so that a
run that is cut off leaves what it had.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from gpu_fleet import say

_PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "pyzmq", "pytest")
_content: dict[str, Any] = {"measured": {}, "tests": {}}
_began_s = time.monotonic()


def begin() -> None:
    """What ran, and on what."""
    _content.update(
        date=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        commit=os.environ.get("TEST_COMMIT") or _said("git", "rev-parse", "HEAD"),
        gpu=_said(
            *("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
        ),
        num_cores=os.cpu_count(),
        kernel=platform.release(),
        python=platform.python_version(),
        versions={name: _version(name) for name in _PACKAGES},
    )
    _write()


def record(name: str, value: Any) -> None:
    """One measured value; shown as well."""
    say(f"{name}: {value}")
    _content["measured"][name] = value
    _write()


def note_start(name: str) -> None:
    """Which test runs."""
    _content["running"] = name
    _write()


def note_test(report: pytest.TestReport) -> None:
    """How one phase of a test ended, how long it took, and what was wrong."""
    test = _content["tests"].setdefault(report.nodeid, {"outcome": report.outcome})
    if report.outcome != "passed":
        test["outcome"] = report.outcome
    if report.failed and "error" not in test:
        test["error"] = _first_line(report)
    test[f"{report.when}_s"] = round(report.duration, 2)
    if report.when == "teardown":
        _content["running"] = None
    _content["total_s"] = round(time.monotonic() - _began_s, 1)
    _write()


def _first_line(report: pytest.TestReport) -> str:
    """Of what the exception said."""
    crash = getattr(report.longrepr, "reprcrash", None)  # not every report has one
    return str(crash.message if crash else report.longrepr).strip().partition("\n")[0][:300]


def _write() -> None:
    if os.environ.get("OUT"):
        text = json.dumps(_content, indent=1, default=str)
        Path(os.environ["OUT"], "gpu_suite.json").write_text(text + "\n")


def _said(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"
