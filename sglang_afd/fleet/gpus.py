"""How many GPUs servers may use, without loading CUDA."""

from __future__ import annotations

import os
import re
from pathlib import Path


def num_visible_gpus() -> int:
    """GPUs of this host, or as many of them as CUDA_VISIBLE_DEVICES names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").iterdir())
