"""compute-sanitizer finds nothing in the kernels of the exchange, and would find it."""

from __future__ import annotations

import gpu_report
import pytest
from gpu_sanitizer import TIMEOUT_S, Sanitizers, find_tool

pytestmark = [
    pytest.mark.timeout(TIMEOUT_S + 30),
    pytest.mark.skipif(find_tool() is None, reason="needs compute-sanitizer of the CUDA toolkit"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_tool_finds_nothing(sanitizers: Sanitizers, tool: str) -> None:
    code, output = sanitizers.result(tool)

    gpu_report.record(f"compute-sanitizer, {tool}", output.strip().splitlines()[-1:])
    assert code == 0, output[-4000:]
    assert "attached anew: right" in output  # the last case


# With which code the tool ends depends on whether the program outlives the fault.
@pytest.mark.parametrize(
    ("tool", "fault", "said"),
    [
        ("memcheck", "read", "Invalid __global__ read"),
        ("racecheck", "race", "Race reported"),
    ],
)
def test_the_tool_finds_a_fault_that_is_planted(
    sanitizers: Sanitizers, tool: str, fault: str, said: str
) -> None:
    code, output = sanitizers.result(tool, "--fault", fault)

    assert code != 0, output[-4000:]
    assert said in output and "afd_push" in output, output[-4000:]
