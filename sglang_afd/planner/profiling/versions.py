"""Which software was measured."""

from __future__ import annotations

import platform
from importlib import metadata

_DISTRIBUTIONS = (
    "sglang",
    "torch",
    "triton",
    "sglang-kernel",
    "flashinfer-python",
    "sgl-deep-gemm",
)


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
