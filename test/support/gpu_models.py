"""Makes the GPU tests' checkpoints: `python gpu_models.py DIR`.

A program of its own, since it takes seconds, and tests run meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_fleet import FAMILIES, IS_CPU, PRECISIONS


def paths(directory: Path) -> Mapping[tuple[str, str], Path]:
    """Of the checkpoint of each family and precision."""
    return {
        (family, name): directory / f"{family}-{name}" for name in PRECISIONS for family in FAMILIES
    }


def main(argv: Sequence[str]) -> int:
    """Make all of them."""
    for (family, name), path in paths(Path(argv[0])).items():
        precision = PRECISIONS[name]
        FAMILIES[family](
            path,
            hidden_size=precision.hidden_size,
            dtype="float32" if IS_CPU else precision.dtype,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
