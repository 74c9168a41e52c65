"""compute-sanitizer finds nothing in the kernels of the exchange, and would find it."""

from __future__ import annotations

import pytest
from gpu_sanitizer import TIMEOUT_S, Sanitizers, is_installed

FOUND = 9  # the script's exit code
pytestmark = [
    pytest.mark.timeout(TIMEOUT_S + 30),
    pytest.mark.skipif(not is_installed(), reason="needs compute-sanitizer, of the CUDA toolkit"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_tool_finds_nothing(sanitizers: Sanitizers, tool: str) -> None:
    code, output = sanitizers.result(tool)

    assert code == 0, output[-4000:]
    assert "attached anew: right" in output  # the last case


def test_memcheck_finds_a_read_beyond_a_tensor(sanitizers: Sanitizers) -> None:
    code, output = sanitizers.result("memcheck", "--fault")

    assert code == FOUND, output[-4000:]
    assert "afd_push" in output
