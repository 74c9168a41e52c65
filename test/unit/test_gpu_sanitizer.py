"""What the GPU tests ask of compute-sanitizer, with a program that stands in for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import gpu_sanitizer
import pytest
from gpu_sanitizer import SCRIPT, Sanitizers, find_tool

MakeTool = Callable[[str], Path]


@pytest.fixture
def make_tool(tmp_path: Path) -> MakeTool:
    """A compute-sanitizer with the options of CUDA 13.0, which runs a line of shell."""

    def make(line: str) -> Path:
        tool = tmp_path / "bin" / "compute-sanitizer"
        tool.parent.mkdir()
        help_ = '[ "$1" != --help ] || { echo "  --kernel-name arg"; exit 0; }'
        tool.write_text(f"#!/bin/sh\n{help_}\n{line}\n")
        tool.chmod(0o755)
        return tool

    return make


@pytest.mark.parametrize(("name", "has_padding"), [("memcheck", True), ("racecheck", False)])
def test_a_run_has_time_to_import_torch_and_room_behind_each_tensor(
    make_tool: MakeTool, name: str, has_padding: bool
) -> None:
    tool = make_tool('echo "$@"; echo caching $PYTORCH_NO_CUDA_MEMORY_CACHING')

    done = subprocess.run(
        [str(SCRIPT), name, "--fault", "read"],
        env={**os.environ, "COMPUTE_SANITIZER": str(tool), "PYTHON": "a-python"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    options, caching = done.stdout.splitlines()
    assert f"--tool {name} " in options and "--kernel-name kns=afd_ " in options
    assert "--launch-timeout 120" in options and "--error-exitcode 9" in options
    assert ("--padding 4096" in options) == has_padding
    assert options.split("a-python ")[1].endswith("/sanitized_exchange.py --fault read")
    assert caching == "caching 1"


def test_a_run_that_does_not_end_is_ended_and_tells_what_it_said(
    make_tool: MakeTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_sanitizer, "TIMEOUT_S", 0.5)
    tool = make_tool("echo so far; sleep 987")

    with Sanitizers(tmp_path, str(tool)) as sanitizers:
        code, output = sanitizers.result("racecheck")

    assert code < 0
    assert output in ("so far\n", "")  # "" where this machine was slow


def test_a_run_that_ends_gives_its_code_and_output(make_tool: MakeTool, tmp_path: Path) -> None:
    tool = make_tool('echo "$@"; exit 9')

    with Sanitizers(tmp_path, str(tool)) as sanitizers:
        code, output = sanitizers.result("memcheck", "--fault", "read")

    assert code == 9
    assert "--fault read" in output


def test_the_tool_is_found_beside_nvcc(
    make_tool: MakeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = make_tool("")
    nvcc = tool.with_name("nvcc")
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    elsewhere = tool.parents[1] / "path"
    elsewhere.mkdir()
    (elsewhere / "nvcc").symlink_to(nvcc)
    monkeypatch.setenv("PATH", str(elsewhere))

    assert find_tool() == str(tool)
